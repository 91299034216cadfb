"""corp-deploy build and corp-deploy audit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation.engine import AuditOptions, EngineOptions
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED

from .command import command
from .options import FILE, command_line
from .stopwatch import keep_effort, stopwatch_on

if TYPE_CHECKING:
    from export.engine.build import Engine


def _built(options: EngineOptions, graph: Path, on_progress: Callable[[int], None]) -> "Engine":
    """`on_progress` hears the builder's steps, where it has any."""
    from export.engine.build import build_engine, build_ort_artifact

    if options.backend == "onnxruntime":
        return build_ort_artifact(graph, device=options.device, precision=options.precision, command=command_line())

    def progress(phase: str, steps: int, _: int) -> None:
        if phase == "Building engine":
            on_progress(steps)

    return build_engine(graph, options.of_engine(command_line()), progress=progress)


@command(first="output backend batch sm precision sparse timing-cache compatibility version-compatible device")
@click.argument("graph", type=FILE)
@click.option(
    "--output",
    "-o",
    type=FILE,
    required=True,
    help="Plan (or optimised graph) to write; its record is written beside it.",
)
def build(graph: Path, output: Path, options: EngineOptions, out: Output) -> None:
    """Build an engine from a typed ONNX graph. Its record is written beside it.

    Example: corp-deploy build reduced/model.fp16.onnx --backend tensorrt-rtx --batch 1:8:64 -o reduced/model.plan
    """
    from corp_deploy.proof.compatibility import bench_lines, build_priced
    from corp_deploy.views.engine import engine_table
    from export.engine.build import write_engine

    lines: tuple[str, ...] = ()
    with stopwatch_on() as watch, out.progress("building", None, unit="steps") as bar, watch.measure("build"):
        if options.compatibility is None:
            built = _built(options, graph, bar)
            write_engine(built, output)
        else:
            built = build_priced(graph, options.of_engine(command_line()), output)
            lines = bench_lines(built.record, output)
    keep_effort(watch, output, step="build")
    record = json.loads(built.record.to_json()) | {"effort": watch.as_json()}
    out.result(record, engine_table(built.record), f"{output}: written", *lines, *watch.lines)


@command()
@click.argument("dense", type=FILE)
@click.argument("reduced", type=FILE)
@click.option("--output", "-o", type=FILE, default=None, help="Also write the audit as JSON.")
def audit(dense: Path, reduced: Path, options: AuditOptions, output: Path | None, out: Output) -> int:
    """Count attention kernels that stay fused, dense and reduced.

    Exit code 1 when a block lost its own.

    Example: corp-deploy audit dense/model.fp16.onnx reduced/model.fp16.onnx --sm 86 --sm 120
    """
    from corp_deploy.views.engine import audit_table, lost_lines
    from export.engine.audit import audit_fusion, audit_to_json
    from ground.files import write_text

    with out.progress("auditing", None, unit="steps"):
        audits = audit_fusion(dense, reduced, backend=options.backend, sms=options.sm, command=command_line())
    text = audit_to_json(audits, dense=dense.name, reduced=reduced.name)
    if output is not None:
        write_text(output, text)
    out.result(json.loads(text), audit_table(audits), *lost_lines(audits))
    return 0 if all(each.passed for each in audits) else EXIT_FAILED
