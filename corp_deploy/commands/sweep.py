"""corp-deploy sweep."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import ATTENTION, PRESET
from corp_deploy.reduction.method import PRESETS
from corp_deploy.views.console import Output
from ground.quantities import SHARE, SHARE_KEPT, SHARE_REMOVED

from .numbers import Alignment, Number, Numbers
from .options import (
    ANY_PATH,
    DIRECTORY,
    FILE,
    ModelChoice,
    Words,
    batch_size_option,
    given_options,
    images_option,
    model_options,
    output_options,
    samples_option,
    seed_option,
)
from .reduce import choices_from_options

if TYPE_CHECKING:
    from corp_deploy.planning.sweep import SweepPoint

REMOVED, KEPT = Numbers(SHARE_REMOVED, example="0.3,0.5"), Numbers(SHARE_KEPT, example="0.6,0.8")


def _images(
    trial: "SweepPoint", images: Path, calibration_images: Path | None, samples: int | None, seed: int
) -> list[str]:
    """The images that reduce looks at: a budget tries sites on those it was scored on, merged channels are fitted."""
    if trial.budget is None:
        merges = PRESETS[trial.preset].merges and calibration_images is not None
        return [f"--images {shlex.quote(str(calibration_images))}"] * merges
    drawn = [] if samples is None else [f"--samples {samples}", f"--seed {seed}"]
    return [f"--images {shlex.quote(str(images))}", *drawn]


def _reduction(
    trial: "SweepPoint", parts: str, heads: str | None, align: dict[str, int] | None, looked_at: list[str]
) -> str:
    """The words by which reduce makes the model of a trial; heads and align as they were given, if they were."""
    touches = trial.budget is not None or (parts != "mlp" and PRESET.ways[trial.preset].takes("attn", True))
    words = [f"--preset {trial.preset}"]
    if trial.budget is not None:
        words.append(f"--macs {trial.budget:g}")
    else:
        words += [f"--mlp {trial.mlp_sparsity:g}"] * (parts != "attn")
        words += [f"--attn {trial.attention_sparsity:g}"] * touches
        words += ["--allow-partial"] * bool(trial.sites_refused)
    if heads and touches:
        words.append(f"--heads {heads}")
    if align:
        words.append(f"--align {','.join(f'{site}={width}' for site, width in align.items())}")
    return " ".join([*words, *looked_at])


@click.command()
@model_options
@click.option("--moments", type=FILE, required=True, help="Moments of this model, written by calibrate.")
@images_option
@click.option(
    "--calibration-images", type=ANY_PATH, default=None, help="Those of the moments, for presets grail-fold and fold."
)
@click.option("--labels", type=FILE, default=None, help="Class indices of the images, for accuracy.")
@click.option(
    "--output", "-o", type=DIRECTORY, required=True, help="Directory for sweep.json, sweep.csv and sweep.svg."
)
@click.option("--sparsity", type=REMOVED, default="0.3,0.5,0.7", show_default=True, help="Shares removed.")
@click.option("--macs", type=KEPT, default=(), help="Budgets too: shares of the dense MACs to keep, with preset best.")
@click.option(
    "--parts",
    type=click.Choice(["joint", "mlp", "attn"]),
    default="joint",
    show_default=True,
    help="What the shares are removed from.",
)
@click.option("--preset", type=Words(*PRESETS), default="best,none", show_default=True, help="One or several.")
@click.option(
    "--heads", type=click.Choice(["padded", "square", "ragged"]), default="padded", show_default=True, help="Geometry."
)
@click.option("--align", type=Alignment(), default="mlp=64,head=16", show_default=True, help="Multiples of widths.")
@click.option("--min-agreement", type=Number(SHARE), default=None, help="Name the smallest model that meets it.")
@samples_option
@seed_option
@batch_size_option
@output_options
def sweep(
    model: ModelChoice,
    moments: Path,
    images: Path,
    calibration_images: Path | None,
    labels: Path | None,
    output: Path,
    sparsity: tuple[float, ...],
    macs: tuple[float, ...],
    parts: str,
    preset: tuple[str, ...],
    heads: str,
    align: dict[str, int],
    min_agreement: float | None,
    samples: int | None,
    seed: int,
    batch_size: int,
    out: Output,
) -> None:
    """Try many sparsities and presets from the same moments and show error and agreement against MACs.

    Example: corp-deploy sweep --model dense --moments moments.safetensors --images held-out/ --sparsity 0.3,0.5,0.7
    --min-agreement 0.99 -o sweep
    """
    import torch

    from calib.store import load
    from corp_deploy.planning.sweep import Scored, SweepRequest, logits, record_of_sweep, smallest_that_agrees
    from corp_deploy.planning.sweep import sweep as sweep_of
    from corp_deploy.store.inputs import images_for_model, labels_from_path
    from corp_deploy.views.sweep import csv_of_sweep, sweep_plot, sweep_table
    from ground.files import write_json, write_text

    mlp, attn = parts != "attn", parts != "mlp"
    touching = [name for name in preset if attn and PRESET.ways[name].takes("attn", attn)]
    given = {name: value for name, value in given_options().items() if name in ("parts", "heads", "calibration_images")}
    PRESET.refuse([("", name) for name in preset], given)
    ATTENTION.refuse([("", "reduced" if touching or macs else "kept")], given)
    merging = [name for name in preset if PRESETS[name].merges]
    if merging and calibration_images is None:
        raise click.UsageError(f"preset {merging[0]} is fitted to the calibration images; give --calibration-images")
    checkpoint = model.load(out)
    source = images_for_model(checkpoint.model, images, samples=samples, seed=seed)
    pixels = torch.cat(list(source.batches(batch_size)))
    calibration = None if calibration_images is None else images_for_model(checkpoint.model, calibration_images)
    scored = Scored(
        images=pixels,
        dense_NC=logits(checkpoint.model, pixels, batch_size),
        labels_N=None if labels is None else labels_from_path(labels, source, checkpoint.model),
        batch_size=batch_size,
    )
    wanted = [
        SweepRequest(
            preset=name,
            method=choices_from_options(
                name, share if mlp else None, share if name in touching else None, heads, align
            ),
        )
        for name in preset
        for share in sparsity
    ]
    wanted += [
        SweepRequest(preset="best", method=choices_from_options("best", None, None, heads, align), budget=share)
        for share in macs
    ]
    with out.progress("sweeping", len(wanted), unit="models") as done:
        trials = sweep_of(checkpoint.model, load(moments), wanted, scored, calibration=calibration, done=done)
    if refused := max(trial.sites_refused for trial in trials):
        out.warn(f"{refused} sites can't be reduced as asked and stay as they are; inspect says why")
    answer = None if min_agreement is None else smallest_that_agrees(trials, min_agreement)
    record = record_of_sweep(trials, answer)
    write_json(output / "sweep.json", record)
    write_text(output / "sweep.csv", csv_of_sweep(trials))
    write_text(output / "sweep.svg", sweep_plot(trials))
    shown: list[Any] = [sweep_table(trials)]
    if answer is not None:
        looked_at = _images(answer, images, calibration_images, samples, seed)
        how = _reduction(answer, parts, given.get("heads"), align if "align" in given_options() else None, looked_at)
        shown.append(f"smallest model with {min_agreement:.2%} agreement: {how} ({answer.macs_share:.1%} of the MACs)")
    out.result(record, *shown)
