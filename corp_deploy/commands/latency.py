"""corp-deploy latency-table."""

from pathlib import Path

import click

from corp_deploy.invocation.method_choice import MULTIPLES, WIDTHS
from corp_deploy.views.console import Output
from ground.quantities import THREADS

from .model_choice import ModelChoice, model_options
from .options import BATCHES, DIRECTORY, output_options
from .value import Value


@click.command("latency-table")
@model_options
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory that keeps the tables of this machine.")
@click.option("--batch", type=BATCHES, default="1,8", show_default=True, help="Batch sizes to measure.")
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "torch"]),
    default="onnxruntime",
    show_default=True,
    help="What runs the blocks.",
)
@click.option(
    "--heads", type=click.Choice(["padded", "square", "ragged"]), default="padded", show_default=True, help="Geometry."
)
@click.option("--align", type=Value(MULTIPLES), default=WIDTHS, show_default=True, help="Multiples of widths.")
@click.option("--threads", type=Value(THREADS), default=None, help="CPU threads; default: the runtime's choice.")
@output_options
def latency_table(
    model: ModelChoice,
    output: Path,
    batch: tuple[int, ...],
    backend: str,
    heads: str,
    align: dict[str, int],
    threads: int | None,
    out: Output,
) -> None:
    """Measure what a block costs at each width on this machine, for `reduce --latency`.

    There is no time limit: every width is timed for 8 rounds.

    Example: corp-deploy latency-table --model dense --batch 1,8 -o tables
    """
    from corp_deploy.planning.latency import LatencyTarget, measure_tables
    from corp_deploy.reduction.method import method_from_preset
    from corp_deploy.views.latency import latency_rows, latency_view

    method = method_from_preset(
        "best",
        geometry=heads,
        align_hidden=align.get("mlp"),
        align_head=align.get("head"),
        align_conv=align.get("conv"),
    )
    target = LatencyTarget(
        backend="torch" if backend == "torch" else "onnxruntime",
        batches=tuple(sorted(batch)),
        cache=output,
        threads=threads,
    )
    with out.progress("measuring", None, unit="tables"):
        tables = measure_tables(model.load(out), method, target)
    rows = latency_rows(tables, target.batches)
    out.result(
        {"rows": rows, "measured": tables.measured},
        latency_view(rows, target.batches),
        f"{output}: {tables.measured} tables measured now",
    )
