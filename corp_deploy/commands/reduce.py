"""corp-deploy reduce."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import ATTENTION, IMAGES, LOOP, PRESET, WIDTHS
from corp_deploy.reduction.method import DEFAULT_RIDGE_REL, LOOPS, MLP_RANKINGS, NOT_HELD_OUT, PRESETS, QK_RANKINGS
from corp_deploy.views.console import Output
from ground.quantities import RIDGE, SHARE_KEPT, SHARE_REMOVED
from ground.quantity import BATCH

from .numbers import Alignment, Number
from .options import (
    ANY_PATH,
    DIRECTORY,
    FILE,
    ModelChoice,
    given_options,
    max_bad_option,
    model_options,
    output_options,
    samples_option,
    seed_option,
    workers_option,
)
from .passes import BUDGET, CLOSED_LOOP, cost

if TYPE_CHECKING:
    from corp_deploy.planning.plan import Budget
    from corp_deploy.reduction.method import LoopName, Method
    from corp_deploy.reduction.read_tokens import Reads


class Ranking(click.ParamType[dict[str, str]]):
    """mlp=wanda,head=magnitude; either may be left out."""

    name = "mlp=how,head=how"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        known = {"mlp": MLP_RANKINGS, "head": QK_RANKINGS}
        words = [part.split("=") for part in str(value).split(",")]
        for word in words:
            if len(word) != 2 or word[1] not in known.get(word[0], ()):
                each = "; ".join(f"{name}= {', '.join(allowed)}" for name, allowed in known.items())
                self.fail(f"{'='.join(word)!r}: expected mlp=HOW,head=HOW with {each}", param, ctx)
        if len({word[0] for word in words}) != len(words):
            self.fail(f"{value!r}: expected mlp= and head= once each", param, ctx)
        return {word[0]: word[1] for word in words}


def _budget(
    shares: dict[str, float | None], mlp: float | None, attn: float | None, tables: Path | None, batch: int | None
) -> "Budget | None":
    from corp_deploy.planning.latency import LatencyTarget
    from corp_deploy.planning.plan import Budget

    given = {currency: share for currency, share in shares.items() if share is not None}
    if len(given) > 1:
        raise click.UsageError(f"--{' and --'.join(given)} are several budgets; give one")
    WIDTHS.refuse([("", next(iter(given), "sparsities"))], given_options())
    if not given:
        if mlp is None and attn is None:
            raise click.UsageError(
                "nothing asked for: give --mlp or --attn a share to remove (0 keeps widths), or a budget: --macs 0.6"
            )
        return None
    if mlp or attn:
        raise click.UsageError("a budget chooses the widths itself; give it without --mlp and --attn")
    if shares["macs"] is not None:
        return Budget(currency="macs", share=shares["macs"])
    if shares["params"] is not None:
        return Budget(currency="params", share=shares["params"])
    if tables is None:
        raise click.UsageError("--latency needs --latency-tables DIR, where the measured tables are kept")
    where = LatencyTarget(backend="onnxruntime", batches=(batch or 1,), cache=tables)
    return Budget(currency="latency", share=given["latency"], where=where)


def choices_from_options(
    preset: str,
    mlp: float | None,
    attn: float | None,
    heads: str,
    align: dict[str, int],
    ridge: float = DEFAULT_RIDGE_REL,
    select: Mapping[str, str] = MappingProxyType({}),
) -> "Method":
    """The preset with what was asked for; a combination that makes no sense is a usage error."""
    from corp_deploy.reduction.method import method_from_preset

    try:
        return method_from_preset(
            preset,
            mlp_sparsity=mlp,
            attention_sparsity=attn,
            geometry="padded" if heads == "auto" else heads,
            align_hidden=align.get("mlp"),
            align_head=align.get("head"),
            ridge_rel=ridge,
            mlp_selection=select.get("mlp"),
            qk_selection=select.get("head"),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@click.command("reduce")
@model_options
@click.option("--moments", type=FILE, required=True, help="Moments of this model, written by calibrate.")
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for model.safetensors and config.json.")
@click.option(
    "--mlp",
    type=Number(SHARE_REMOVED),
    default=None,
    help="Share of MLP hidden channels to remove; 0 repairs at full width; default: MLPs are left alone.",
)
@click.option(
    "--attn",
    type=Number(SHARE_REMOVED),
    default=None,
    help="Share of query/key dimensions to remove; 0 repairs at full width; default: attention is left alone.",
)
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), default="best", show_default=True, help="How to choose and repair."
)
@click.option(
    "--select",
    type=Ranking(),
    default=None,
    help="Rank by something else than the preset does: mlp=producer-l2 or head=magnitude.",
)
@click.option(
    "--heads",
    type=click.Choice(["padded", "square", "ragged", "auto"]),
    default="padded",
    show_default=True,
    help="padded and square keep engines' fused attention, ragged loses it; auto takes the better at equal MACs.",
)
@click.option(
    "--macs",
    type=Number(SHARE_KEPT),
    default=None,
    help=f"Share of the dense MACs to keep: widths differ by site; {cost(BUDGET)}.",
)
@click.option(
    "--params", type=Number(SHARE_KEPT), default=None, help="Share of the dense parameters to keep, likewise."
)
@click.option(
    "--latency", type=Number(SHARE_KEPT), default=None, help="Share of the dense latency to keep, on this machine."
)
@click.option("--latency-tables", type=DIRECTORY, default=None, help="Where --latency keeps its tables.")
@click.option("--batch", type=Number(BATCH), default=None, help="The batch size that --latency is about; default 1.")
@click.option("--allow-partial", is_flag=True, help="Go on where sites that were asked for can't be reduced.")
@click.option(
    "--closed-loop",
    type=click.Choice(LOOPS),
    is_flag=False,
    flag_value="asymmetric",
    default=None,
    help="Block by block on the model as reduced so far: alone or asymmetric, fitted to what the dense model's stream "
    f"has, {cost(CLOSED_LOOP)}; symmetric, as GRAIL publishes it, to what the dense weights would do there.",
)
@click.option(
    "--reads",
    type=click.Choice(["all", "pooled"]),
    default=None,
    help="Tokens the last block is fitted to: all, or those the outputs read; default: all without a classifier. "
    + LOOP.help("reads"),
)
@click.option(
    "--held-out", type=FILE, default=None, help="Moments of other images (calibrate --hold-out): judges every site."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the solving is done.",
)
@click.option(
    "--images",
    type=ANY_PATH,
    default=None,
    help="Calibration images: for a budget, auto, the closed loop and presets grail-fold and fold.",
)
@samples_option
@seed_option
@workers_option
@max_bad_option
@click.option(
    "--align",
    type=Alignment(),
    default="mlp=64,head=16",
    show_default=True,
    help="Multiples that widths are rounded to; at least 8.",
)
@click.option(
    "--ridge",
    type=Number(RIDGE),
    default=DEFAULT_RIDGE_REL,
    show_default=True,
    help="Regularisation, relative to the mean diagonal of the matrix it is added to.",
)
@output_options
def reduce_command(
    model: ModelChoice,
    moments: Path,
    output: Path,
    mlp: float | None,
    attn: float | None,
    preset: str,
    select: dict[str, str] | None,
    heads: str,
    macs: float | None,
    params: float | None,
    latency: float | None,
    latency_tables: Path | None,
    batch: int | None,
    allow_partial: bool,
    closed_loop: "LoopName | None",
    reads: "Reads | None",
    held_out: Path | None,
    device: str,
    images: Path | None,
    samples: int | None,
    seed: int,
    workers: int,
    max_bad: int,
    align: dict[str, int],
    ridge: float,
    out: Output,
) -> None:
    """Remove MLP channels and query/key dimensions and repair the loss in closed form.

    Example: corp-deploy reduce --model deit_small_patch16_224 --weights deit_small.safetensors --moments
    moments.safetensors --mlp 0.5 --attn 0.5 -o reduced
    """
    from calib.store import load as load_moments
    from corp_deploy.planning.carry_out import measured_speedup, record_of_reduction, reduce_checkpoint
    from corp_deploy.planning.plan import ReductionRequest
    from corp_deploy.store.checkpoint import on_device
    from corp_deploy.store.inputs import images_for_model
    from corp_deploy.views.reduction import site_table, ways_table
    from ground.gpu import require_device

    PRESET.refuse([("", preset)], given_options())
    budget = _budget({"macs": macs, "params": params, "latency": latency}, mlp, attn, latency_tables, batch)
    asked = ReductionRequest(
        preset=preset,
        method=choices_from_options(preset, mlp, attn, heads, align, ridge, select or {}),
        budget=budget,
        auto_heads=heads == "auto",
        closed_loop=closed_loop,
        allow_partial=allow_partial,
        reads=reads,
    )
    touched = attn is not None or budget is not None or asked.auto_heads
    ATTENTION.refuse([("", "reduced" if touched else "kept")], given_options())
    LOOP.refuse([("", closed_loop or "open")], given_options())
    IMAGES.refuse([("", "images" if asked.needs_images else "none")], given_options())
    if held_out is not None and closed_loop is not None:
        raise click.UsageError(f"--closed-loop: {NOT_HELD_OUT[closed_loop]}; leave --held-out away")
    require_device(device)
    dense = on_device(model.load(out), device)
    source = None
    if images is not None:
        source = images_for_model(dense.model, images, samples=samples, seed=seed, workers=workers, max_bad=max_bad)
    with out.progress(
        f"reducing ({cost(CLOSED_LOOP)})" if closed_loop == "asymmetric" else "reducing", None, unit="sites"
    ) as done:
        reduction, planned = reduce_checkpoint(
            dense,
            moments,
            asked,
            directory=output,
            images=source,
            held_out=None if held_out is None else load_moments(held_out),
            done=done,
        )
    for note in reduction.notes:
        out.warn(note)
    if heads == "ragged" and attn:
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded or square heads keep it")
    record = record_of_reduction(reduction, planned)
    checked = []
    if planned.predicted_speedup is not None:
        with out.progress("measuring the result", None):
            speed = measured_speedup(dense, output, batch or 1)
        record |= {"predicted_speedup": planned.predicted_speedup, "measured_speedup": speed}
        off = planned.predicted_speedup / speed - 1.0
        checked.append(f"speed-up predicted {planned.predicted_speedup:.3f}, measured {speed:.3f}: {off:+.1%} off")
    written = f"{output}: reduced model written, {reduction.coverage.verdict}"
    weighed = [ways_table(planned.ways)] if planned.ways else []
    out.result(
        record,
        site_table(reduction.sites),
        *weighed,
        *planned.said,
        *reduction.said,
        *checked,
        written,
    )
