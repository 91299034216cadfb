"""The commands reduce and latency-table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from corp_deploy.invocation.budget_choice import CLOSED_LOOP, cost
from corp_deploy.invocation.input_choice import KINDS, InputOptions
from corp_deploy.invocation.method_choice import GeometryOptions, MethodChoice
from corp_deploy.invocation.option import option
from corp_deploy.invocation.reduction import ReduceFiles, ReduceOptions
from corp_deploy.invocation.values import ListOf
from corp_deploy.views.console import Output
from ground.quantity import BATCH, THREADS

from .command import ModelChoice, command, some
from .options import DIRECTORY

LOOKED_AT = some(
    *(*KINDS, "samples", "seed", "workers", "max_bad", "hold_out", "groups"),
    images="Calibration images: for a budget, --heads auto, the closed loop, --rescale, a polish, --sparse, and "
    "presets that merge channels or heads.",
    text="For a text encoder: calibration texts, one per line, in place of --images.",
)


@command(first="model weights moments output mlp attn macs preset closed-loop images")
def reduce_command(
    model: ModelChoice,
    files: ReduceFiles,
    reduction: ReduceOptions,
    inputs: Annotated[InputOptions, LOOKED_AT],
    out: Output,
) -> None:
    """Narrow a model and repair the loss in closed form.

    It removes MLP channels, query/key dimensions, whole heads and channels between convolutions; --sparse sets weights
    to zero.

    With --polish a further fit follows, and after an interruption the same command resumes.

    Example: corp-deploy reduce --model deit_small_patch16_224 --weights deit_small.safetensors --moments
    moments.safetensors --images calibration/ --macs 0.7 -o reduced
    """
    from corp_deploy.planning.carried_out import Polishing
    from corp_deploy.planning.execution import reduce_checkpoint
    from corp_deploy.planning.refusals import require_sayable
    from corp_deploy.planning.request import build_reduction_record, build_request
    from corp_deploy.polish.state import state_beside
    from corp_deploy.proof.speed import measure_speedup
    from corp_deploy.store.manifest import path_beside, timed_on, write_effort
    from corp_deploy.views.reduction import polishing_shown, reduction_shown
    from ground.gpu import require_device

    require_device(reduction.device)
    output = Path(files.output)
    title = f"reducing ({cost(CLOSED_LOOP)})" if reduction.loop == "asymmetric" else "reducing"
    resumed = state_beside(output).exists()
    with timed_on(reduction.device) as watch:
        dense = model.load(out)
        require_sayable(dense, build_request(reduction))  # before the images are read
        images = None if inputs.path is None else inputs.split(inputs.open(dense, out.note), inputs.seed).fitted
        with out.progress(title, None, unit="sites" if reduction.within is None else "models") as bar:
            result, plan = reduce_checkpoint(
                dense,
                Path(files.moments),
                reduction,
                directory=output,
                images=images,
                on_progress=bar,
                watch=watch,
                polishing=Polishing(
                    state=state_beside(output), on_progress=lambda now: bar.renamed(*polishing_shown(now))
                ),
            )
    write_effort(path_beside(output), "reduce", watch, device=reduction.device, resumed=resumed)
    for note in result.notes:
        out.warn(note)
    if reduction.heads == "ragged" and reduction.attn:
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded or square heads keep it")
    if any(site.part == "heads" and site.width == 1 < site.width_dense for site in result.sites):
        out.warn("a single head left loses the fused attention kernel in TensorRT-RTX engines; two or more keep it")
    record, measured = build_reduction_record(result, plan), []
    if plan.predicted_speedup is not None:
        with out.progress("measuring the result", None):
            speed = measure_speedup(dense, output, reduction.batch or 1)
        record |= {"predicted_speedup": plan.predicted_speedup, "measured_speedup": speed}
        off = plan.predicted_speedup / speed - 1.0
        measured.append(f"speed-up predicted {plan.predicted_speedup:.3f}, measured {speed:.3f}: {off:+.1%} off")
    others = ["tokens merged"] * ("merging" in record) + ["weights sparse"] * ("sparsity" in record)
    done_words = others + [result.coverage.verdict] * (bool(result.coverage.reduced) or not others)
    written = f"{output}: reduced model written, {', '.join(done_words)}"
    out.result(record | {"effort": watch.as_json()}, *reduction_shown(result, plan), *measured, written, *watch.lines)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(GeometryOptions, heading="What is timed"):
    """The options of `latency-table`: batch sizes, backend and threads, and the widths of GeometryOptions."""

    batch: Sequence[int] = option(ListOf(BATCH, "1,8,32"), (1, 8), help="Batch sizes to measure.")
    backend: Literal["onnxruntime", "torch"] = option(default="onnxruntime", help="What runs the blocks.")
    threads: int | None = option(THREADS, help="CPU threads; default: the runtime's choice.")


@command("latency-table", first="model weights output batch backend heads align threads")
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for the latency tables of this machine.")
def latency_table(model: ModelChoice, output: Path, options: LatencyOptions, out: Output) -> None:
    """Measure the latency of blocks, for reduce --latency.

    There is no time limit: every width is timed for 8 rounds.

    Example: corp-deploy latency-table --model dense --batch 1,8 -o tables
    """
    from corp_deploy.planning.latency import measure_tables
    from corp_deploy.planning.request import LatencyTarget
    from corp_deploy.views.latency import latency_rows, latency_view

    method = MethodChoice(heads=options.heads, align=options.align).method
    target = LatencyTarget(
        backend=options.backend, batches=tuple(sorted(options.batch)), cache=output, threads=options.threads
    )
    with out.progress("measuring", None, unit="tables") as bar:
        tables = measure_tables(model.load(out), method, target, on_progress=bar)
    rows = latency_rows(tables, target.batches)
    out.result(
        {"rows": rows, "measured": tables.measured},
        latency_view(rows, target.batches),
        f"{output}: {tables.measured} tables measured now",
    )
