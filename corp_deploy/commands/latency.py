"""corp-deploy latency-table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from corp_deploy.invocation.method_choice import GeometryOptions, MethodChoice
from corp_deploy.invocation.option import option
from corp_deploy.invocation.values import ListOf
from corp_deploy.views.console import Output
from ground.quantity import BATCH, THREADS

from .command import command
from .model_choice import ModelChoice
from .options import DIRECTORY


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(GeometryOptions, heading="What is timed"):
    """What is measured, and in what."""

    batch: Sequence[int] = option(ListOf(BATCH, "1,8,32"), (1, 8), help="Batch sizes to measure.")
    backend: Literal["onnxruntime", "torch"] = option(default="onnxruntime", help="What runs the blocks.")
    threads: int | None = option(THREADS, help="CPU threads; default: the runtime's choice.")


@command("latency-table", first="model weights output batch backend heads align threads")
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory that keeps the tables of this machine.")
def latency_table(model: ModelChoice, output: Path, options: LatencyOptions, out: Output) -> None:
    """Measure blocks at each width here, for reduce --latency.

    There is no time limit: every width is timed for 8 rounds.

    Example: corp-deploy latency-table --model dense --batch 1,8 -o tables
    """
    from corp_deploy.planning.latency import measure_tables
    from corp_deploy.planning.request import LatencyTarget
    from corp_deploy.views.speed import latency_rows, latency_view

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
