"""corp-deploy reduce."""

from pathlib import Path
from typing import Any

import click

from ..choices import DEFAULT_RIDGE_REL, PRESETS
from ..console import Output, output_options
from .options import DIRECTORY, FILE, SPARSITY, ModelChoice, model_options


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
    type=click.Choice(["padded", "ragged"]),
    default="padded",
    show_default=True,
    help="padded keeps engines' fused attention; ragged saves QK' and loses it.",
)
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
    align: dict[str, int],
    ridge: float,
    out: Output,
) -> None:
    """Remove MLP channels and query/key dimensions and repair the loss in closed form.

    Example: corp-deploy reduce --model deit_small_patch16_224 --weights deit_small.safetensors --moments
    moments.safetensors --mlp 0.5 --attn 0.5 -o reduced
    """
    from ..choices import choices_from_preset
    from ..reducing import reduce_checkpoint, site_table

    if mlp == 0.0 and attn == 0.0:
        raise click.UsageError("nothing to remove: give --mlp or --attn a share above 0")
    choices = choices_from_preset(
        preset,
        mlp_sparsity=mlp,
        attention_sparsity=attn,
        geometry=heads,
        align_hidden=align.get("mlp"),
        align_head=align.get("head"),
        ridge_rel=ridge,
    )
    with out.progress("reducing", None, unit="sites") as done:
        reduction = reduce_checkpoint(model.load(), moments, choices, preset=preset, directory=output, done=done)
    for note in reduction.notes:
        out.warn(note)
    out.result(reduction.as_json(), site_table(reduction.sites), f"{output}: reduced model written")
