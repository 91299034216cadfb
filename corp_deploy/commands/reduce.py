"""corp-deploy reduce."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..choices import DEFAULT_RIDGE_REL, PRESETS
from ..console import Output, output_options
from .options import (
    ANY_PATH,
    DIRECTORY,
    FILE,
    SPARSITY,
    ModelChoice,
    model_options,
    samples_option,
    seed_option,
)

if TYPE_CHECKING:
    from ..choices import Choices
    from ..reducing import Budget

SHARE_KEPT = click.FloatRange(0, 1, min_open=True)


class Alignment(click.ParamType[dict[str, int]]):
    """mlp=64,head=16; either may be left out."""

    name = "mlp=n,head=n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        try:
            pairs = dict(part.split("=") for part in str(value).split(","))
            aligned = {name: int(number) for name, number in pairs.items()}
        except ValueError:
            self.fail(f"{value!r}: expected mlp=64,head=16", param, ctx)
        if not aligned or aligned.keys() - {"mlp", "head"} or min(aligned.values()) < 1:
            self.fail(f"{value!r}: expected mlp=64,head=16 with whole numbers of at least 1", param, ctx)
        return aligned


def _budget(macs: float | None, params: float | None, mlp: float, attn: float) -> "Budget | None":
    from ..reducing import Budget

    if macs is not None and params is not None:
        raise click.UsageError("--macs and --params are two budgets; give one")
    if macs is None and params is None:
        if mlp == 0.0 and attn == 0.0:
            raise click.UsageError("nothing to remove: give --mlp or --attn a share above 0, or a budget: --macs 0.6")
        return None
    if mlp > 0.0 or attn > 0.0:
        raise click.UsageError("a budget chooses the widths itself; give --macs or --params without --mlp and --attn")
    return Budget(currency="macs", share=macs) if macs is not None else Budget(currency="params", share=params or 1.0)


def _choices(preset: str, mlp: float, attn: float, heads: str, align: dict[str, int], ridge: float) -> "Choices":
    from ..choices import choices_from_preset

    try:
        return choices_from_preset(
            preset,
            mlp_sparsity=mlp,
            attention_sparsity=attn,
            geometry="padded" if heads == "auto" else heads,
            align_hidden=align.get("mlp"),
            align_head=align.get("head"),
            ridge_rel=ridge,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@click.command("reduce")
@model_options
@click.option("--moments", type=FILE, required=True, help="Moments of this model, written by calibrate.")
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for model.safetensors and config.json.")
@click.option("--mlp", type=SPARSITY, default=0.0, show_default=True, help="Share of MLP hidden channels to remove.")
@click.option("--attn", type=SPARSITY, default=0.0, show_default=True, help="Share of query/key dimensions to remove.")
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), default="best", show_default=True, help="How to choose and repair."
)
@click.option(
    "--heads",
    type=click.Choice(["padded", "square", "ragged", "auto"]),
    default="padded",
    show_default=True,
    help="padded and square keep engines' fused attention, ragged loses it; auto takes the better at equal MACs.",
)
@click.option("--macs", type=SHARE_KEPT, default=None, help="Share of the dense MACs to keep: widths differ by site.")
@click.option("--params", type=SHARE_KEPT, default=None, help="Share of the dense parameters to keep, likewise.")
@click.option("--closed-loop", is_flag=True, help="Block by block, fitted to what the dense model's stream has.")
@click.option("--images", type=ANY_PATH, default=None, help="Unlabelled images for a budget, auto or the closed loop.")
@samples_option
@seed_option
@click.option(
    "--align",
    type=Alignment(),
    default="mlp=64,head=16",
    show_default=True,
    help="Multiples that widths are rounded to; at least 8.",
)
@click.option(
    "--ridge",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_RIDGE_REL,
    show_default=True,
    help="Regularisation, relative to the mean diagonal of the matrix it is added to.",
)
@output_options
def reduce_command(
    model: ModelChoice,
    moments: Path,
    output: Path,
    mlp: float,
    attn: float,
    preset: str,
    heads: str,
    macs: float | None,
    params: float | None,
    closed_loop: bool,
    images: Path | None,
    samples: int | None,
    seed: int,
    align: dict[str, int],
    ridge: float,
    out: Output,
) -> None:
    """Remove MLP channels and query/key dimensions and repair the loss in closed form.

    Example: corp-deploy reduce --model deit_small_patch16_224 --weights deit_small.safetensors --moments
    moments.safetensors --mlp 0.5 --attn 0.5 -o reduced
    """
    from ..inputs import images_for_model
    from ..reducing import Asked, record_of_reduction, reduce_checkpoint, site_table

    budget = _budget(macs, params, mlp, attn)
    asked = Asked(
        preset=preset,
        choices=_choices(preset, mlp, attn, heads, align, ridge),
        budget=budget,
        auto_heads=heads == "auto",
        closed_loop=closed_loop,
    )
    if images is not None and not asked.needs_images:
        raise click.UsageError("--images is looked at for --macs, --params, --heads auto and --closed-loop only")
    dense = model.load()
    source = None if images is None else images_for_model(dense.model, images, samples=samples, seed=seed)
    with out.progress("reducing", None, unit="sites") as done:
        reduction, planned = reduce_checkpoint(dense, moments, asked, directory=output, images=source, done=done)
    for note in reduction.notes:
        out.warn(note)
    if heads == "ragged" and attn > 0.0:
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded or square heads keep it")
    record = record_of_reduction(reduction, planned)
    out.result(record, site_table(reduction.sites), *planned.said, f"{output}: reduced model written")
