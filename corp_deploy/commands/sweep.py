"""corp-deploy sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.method_choice import MethodChoice
from corp_deploy.invocation.table import ATTENTION, FITTED, PRESET
from corp_deploy.reduction.method import PRESETS
from corp_deploy.views.console import Output
from ground.quantities import SHARE, SHARE_KEPT, SHARE_REMOVED

from .input_choice import InputChoice, drawing_options, images_option, input_options, text_option
from .model_choice import ModelChoice, model_options
from .numbers import WIDTHS, Alignment, Number, Numbers
from .options import (
    ANY_PATH,
    DIRECTORY,
    FILE,
    Words,
    batch_size_option,
    explicit_options,
    output_options,
    usage_errors,
    value_options,
)

if TYPE_CHECKING:
    from torch import nn

    from corp_deploy.planning.sweep import SweepPoint, SweepRequest

KINDS = {"mlp": "channels", "attn": "heads", "conv": "convolutions"}
"""Of sites, by the part that they are told apart by."""
REMOVED, KEPT = Numbers(SHARE_REMOVED, example="0.3,0.5"), Numbers(SHARE_KEPT, example="0.6,0.8")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepChoice:
    """Which models are tried: every preset at every share removed from `parts`, of which the model has those `there`,
    and preset best at every budget.
    """

    sparsity: tuple[float, ...]
    macs: tuple[float, ...]
    parts: str
    preset: tuple[str, ...]
    heads: str
    align: dict[str, int]
    calibration_images: Path | None
    calibration_text: Path | None
    there: tuple[str, ...] = ("mlp", "attn")

    def __post_init__(self) -> None:
        merging = [name for name in self.preset if PRESETS[name].merges]
        if merging and self.calibration.path is None:
            raise click.UsageError(
                f"preset {merging[0]} is fitted to the calibration images; give --calibration-images, or "
                "--calibration-text for a text encoder"
            )

    @property
    def calibration(self) -> InputChoice:
        """What presets that merge channels are fitted to."""
        return InputChoice(images=self.calibration_images, text=self.calibration_text)

    def touches_attention(self, preset: str) -> bool:
        return self._tries("attn") and PRESET.ways[preset].takes("attn", True)

    def touches_convolutions(self, preset: str) -> bool:
        return self._tries("conv") and PRESET.ways[preset].takes("conv", True)

    def _tries(self, part: str) -> bool:
        """Whether shares are removed from such parts, as far as the model has them."""
        return self.parts in ("joint", part) and part in self.there

    def refuse_ignored(self, options: dict[str, Any]) -> None:
        """Raise BadInput for one of these options that no preset of the sweep honours."""
        about = {name: value for name, value in options.items() if name in ("parts", "heads", *FITTED)}
        PRESET.refuse([("", name) for name in self.preset], about)
        touching = any(map(self.touches_attention, self.preset)) or bool(self.macs)
        ATTENTION.refuse([("", "reduced" if touching else "kept")], about)

    def _request(self, preset: str, share: float | None, budget: float | None = None) -> "SweepRequest":
        from corp_deploy.planning.sweep import SweepRequest

        choice = MethodChoice(
            preset=preset,
            mlp=share if self._tries("mlp") else None,
            attn=share if self.touches_attention(preset) else None,
            conv=share if self.touches_convolutions(preset) else None,
            heads=self.heads,
            align=self.align,
        )
        return SweepRequest(preset=preset, method=choice.method, budget=budget)

    def of_model(self, model: "nn.Module") -> "SweepChoice":
        """With the parts that the model has. Raises BadInput for what is asked of others."""
        from corp_deploy.families.idle_options import kinds_of, refuse_idle_options

        for part, kind in KINDS.items():
            refuse_idle_options(model, kind, {"--parts": self.parts if self.parts == part else None})
        refuse_idle_options(model, "heads", {"--heads": None if self.heads == "padded" else self.heads})
        there = tuple(part for part, kind in KINDS.items() if kind in kinds_of(model))
        return replace(self, there=there)

    def requests(self) -> "list[SweepRequest]":
        """In the order in which they are tried and shown."""
        uniform = [self._request(preset, share) for preset in self.preset for share in self.sparsity]
        return uniform + [self._request("best", None, budget) for budget in self.macs]

    def words_of(self, point: "SweepPoint", inputs: InputChoice, options: dict[str, Any]) -> str:
        """What to add to reduce for the model of this point; `options` are those that were typed."""
        touches = point.budget is not None or self.touches_attention(point.preset)
        words = [f"--preset {point.preset}"]
        if point.budget is not None:
            words.append(f"--macs {point.budget:g}")
        else:
            words += [f"--mlp {point.mlp_sparsity:g}"] * self._tries("mlp")
            words += [f"--attn {point.attention_sparsity:g}"] * touches
            words += [f"--conv {point.conv_sparsity:g}"] * self.touches_convolutions(point.preset)
            words += ["--allow-partial"] * bool(point.sites_refused)
        if "heads" in options and touches:
            words.append(f"--heads {self.heads}")
        if "align" in options:
            words.append(f"--align {','.join(f'{site}={width}' for site, width in self.align.items())}")
        return " ".join([*words, *self._words_of_inputs(point, inputs)])

    def _words_of_inputs(self, point: "SweepPoint", inputs: InputChoice) -> Sequence[str]:
        """A budget tries sites on the inputs that the sweep was scored on; merged channels are fitted to their own."""
        if point.budget is None:
            merges = PRESETS[point.preset].merges and self.calibration.path is not None
            return [self.calibration.words] * merges
        drawn = [] if inputs.samples is None else [f"--samples {inputs.samples}", f"--seed {inputs.seed}"]
        return [inputs.words, *drawn]


def _sweep_choice(**options: Any) -> SweepChoice:
    explicit = explicit_options()
    choice = SweepChoice(**options)
    choice.refuse_ignored(explicit)
    return choice


sweep_options = value_options(
    "sweep",
    _sweep_choice,
    click.option(
        "--calibration-images",
        type=ANY_PATH,
        default=None,
        help="Those of the moments, for presets grail-fold and fold.",
    ),
    click.option("--calibration-text", type=FILE, default=None, help="The same of a text encoder."),
    click.option("--sparsity", type=REMOVED, default="0.3,0.5,0.7", show_default=True, help="Shares removed."),
    click.option(
        "--macs", type=KEPT, default=(), help="Budgets too: shares of the dense MACs to keep, with preset best."
    ),
    click.option(
        "--parts",
        type=click.Choice(["joint", "mlp", "attn", "conv"]),
        default="joint",
        show_default=True,
        help="What the shares are removed from.",
    ),
    click.option("--preset", type=Words(*PRESETS), default="best,none", show_default=True, help="One or several."),
    click.option(
        "--heads",
        type=click.Choice(["padded", "square", "ragged"]),
        default="padded",
        show_default=True,
        help="Geometry.",
    ),
    click.option("--align", type=Alignment(), default=WIDTHS, show_default=True, help="Multiples of widths."),
)


@click.command("sweep")
@model_options
@click.option("--moments", type=FILE, required=True, help="Moments of this model, written by calibrate.")
@input_options(
    images_option(),
    text_option(),
    click.option("--labels", type=FILE, default=None, help="Class indices of the images, for accuracy."),
    *drawing_options,
)
@click.option(
    "--output", "-o", type=DIRECTORY, required=True, help="Directory for sweep.json, sweep.csv and sweep.svg."
)
@sweep_options
@click.option("--min-agreement", type=Number(SHARE), default=None, help="Name the smallest model that meets it.")
@batch_size_option
@output_options
def sweep_command(
    model: ModelChoice,
    moments: Path,
    inputs: InputChoice,
    output: Path,
    sweep: SweepChoice,
    min_agreement: float | None,
    batch_size: int,
    out: Output,
) -> None:
    """Try many sparsities and presets from the same moments and show error and agreement against MACs.

    Example: corp-deploy sweep --model dense --moments moments.safetensors --images held-out/ --sparsity 0.3,0.5,0.7
    --min-agreement 0.99 -o sweep
    """
    from calib.store import load
    from corp_deploy.planning.sweep import (
        record_of_sweep,
        scored_inputs,
        sentence_of_sweep,
        smallest_that_agrees,
    )
    from corp_deploy.planning.sweep import sweep as sweep_of
    from corp_deploy.views.sweep import csv_of_sweep, sweep_plot, sweep_table
    from ground.files import write_json, write_text

    with usage_errors():
        requests = sweep.requests()
    checkpoint = model.load(out)
    sweep = sweep.of_model(checkpoint.model)
    requests = sweep.requests()
    source = inputs.open(checkpoint)
    labels, calibration = inputs.class_indices(source, checkpoint), sweep.calibration
    with out.progress("sweeping", len(requests), unit="models") as done:
        points = sweep_of(
            checkpoint.model,
            load(moments),
            requests,
            scored_inputs(checkpoint.model, source, labels, batch_size),
            calibration=None if calibration.path is None else calibration.open(checkpoint),
            done=done,
        )
    if refused := max(point.sites_refused for point in points):
        out.warn(f"{refused} sites can't be reduced as asked and stay as they are; inspect says why")
    answer = None if min_agreement is None else smallest_that_agrees(points, min_agreement)
    record = record_of_sweep(points, answer)
    write_json(output / "sweep.json", record)
    write_text(output / "sweep.csv", csv_of_sweep(points))
    write_text(output / "sweep.svg", sweep_plot(points))
    lines = [sentence_of_sweep(points)]
    if answer is not None:
        words = sweep.words_of(answer, inputs, explicit_options())
        lines.append(
            f"smallest model with {min_agreement:.2%} agreement: {words} ({answer.macs_share:.1%} of the MACs)"
        )
    out.result(record, sweep_table(points), *lines)
