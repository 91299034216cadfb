"""The commands export, build and audit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from corp_deploy.invocation.engine import AuditOptions, EngineOptions
from corp_deploy.invocation.export_choice import ExportFiles, ExportOptions
from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED
from ground.precision import PRECISIONS, QUANTISED

from .command import ModelChoice, command, some
from .options import FILE, command_line

if TYPE_CHECKING:
    from export.engine.build import Engine


def _record_of(name: str, path: Path, kept: Sequence[str]) -> dict[str, Any]:
    from corp_deploy.store.graph_facts import facts_of_graph
    from ground.files import sha256_of_file

    facts = facts_of_graph(path)
    record: dict[str, Any] = {"path": str(path), "precision": name}
    record |= {"opset": facts.opset} if facts.opset else {"compiled_for": facts.compiled_for}
    if name in QUANTISED:
        record |= {"rest": facts.rest, "scales": facts.scales, "kept_rest": list(kept)}
        record |= {"weight_bits": facts.weight_bits} if facts.weight_bits != 8 else {}
    record |= {"fusion_breaks": list(facts.fusion_breaks)} if facts.fusion_breaks else {}
    record |= {"normalised": facts.normalised} if facts.normalised else {}
    return {**record, "sha256": sha256_of_file(path), "size_bytes": path.stat().st_size}


LOOKED_AT = some(
    *("images", "text", "arrays", "samples", "seed"),
    images="Images for --auto, and for the ranges of int8 and fp8.",
    text="For a text encoder: texts, one per line, in place of --images.",
    arrays="For a model of arrays: arrays in place of --images.",
)


@command(first="model weights output precision format batch input images auto keep-fp32")
@click.option(
    "--dense", default=None, help="For --auto: the dense model's directory; errors are compared with its own error."
)
def export_command(
    model: ModelChoice,
    files: ExportFiles,
    options: ExportOptions,
    inputs: Annotated[InputOptions, LOOKED_AT],
    dense: str | None,
    out: Output,
) -> None:
    """Write typed ONNX graphs of a dense or reduced model.

    With --format aoti, AOTInductor compiles the same program to packages (.pt2) for this kind of machine.

    Example: corp-deploy export --model reduced -o reduced/model.onnx --precision fp32,fp16
    """
    from corp_deploy.proof.graphs import Graphs
    from corp_deploy.proof.model_inputs import inputs_from_set
    from corp_deploy.store.dense_model import model_of_directory
    from corp_deploy.store.manifest import path_beside, timed_on, write_effort
    from corp_deploy.views.engine import graph_lines

    options.require_inputs(inputs.path is not None)
    options.require_suffix(Path(files.output))
    output, rows = Path(files.output), list[dict[str, Any]]()
    with timed_on() as watch:
        checkpoint = model.load(out)
        feeds = None if inputs.path is None else inputs_from_set(inputs.open(checkpoint, out.note)).feeds
        yardstick = None if dense is None else model_of_directory(Path(dense))
        graphs = Graphs(checkpoint, options, feeds, dense=yardstick, where=model.model, command=command_line())
        with out.progress("exporting", len(options.precisions), unit="graphs") as bar, watch.measure("export"):
            for name, path in graphs.paths(output).items():
                rows.append(_record_of(name, path, graphs.write(name, path)))
                bar(len(rows))
    write_effort(path_beside(Path(rows[0]["path"])), "export", watch)
    if options.heads == "ragged":
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded heads keep it")
    kept = {name: found.kept for name, found in graphs.found.items()}
    for name, sites in kept.items():
        if not sites and f".{name}" in output.suffixes:
            out.warn(f"{output}: an {PRECISIONS[name].pure} graph, although its name says {name}")
    every = dict.fromkeys(site for sites in kept.values() for site in sites)
    record = {"written": rows, "kept_fp32": list(every), "effort": watch.as_json()}
    out.result(record, *graph_lines(rows, kept=kept if options.auto else {}), *watch.lines)


def _built(options: EngineOptions, graph: Path, on_progress: Callable[[int], None]) -> "Engine":
    """Return a built engine or optimised graph; `on_progress` is called with the engine builder's finished steps."""
    from export.engine.build import build_engine, build_ort_artifact

    if options.backend == "onnxruntime":
        return build_ort_artifact(graph, device=options.device, precision=options.precision, command=command_line())

    def progress(phase: str, steps: int, _: int) -> None:
        if phase == "Building engine":
            on_progress(steps)

    return build_engine(graph, options.build_options(command_line()), progress=progress)


@command(first="output backend batch sm precision sparse timing-cache compatibility version-compatible device")
@click.argument("graph", type=FILE)
@click.option(
    "--output",
    "-o",
    type=FILE,
    required=True,
    help="Plan (or optimised graph) to write; its record is written beside it.",
)
def build_command(graph: Path, output: Path, options: EngineOptions, out: Output) -> None:
    """Build an engine from a typed ONNX graph. Its record is written beside it.

    Example: corp-deploy build reduced/model.fp16.onnx --backend tensorrt-rtx --batch 1:8:64 -o reduced/model.plan
    """
    from corp_deploy.proof.compatibility import bench_lines, build_priced
    from corp_deploy.store.manifest import path_beside, timed_on, write_effort
    from corp_deploy.views.engine import engine_table
    from export.engine.build import write_engine

    lines: tuple[str, ...] = ()
    with timed_on() as watch, out.progress("building", None, unit="steps") as bar, watch.measure("build"):
        if options.compatibility is None:
            built = _built(options, graph, bar)
            write_engine(built, output)
        else:
            built = build_priced(graph, options.build_options(command_line()), output)
            lines = bench_lines(built.record, output)
    write_effort(path_beside(output), "build", watch)
    record = built.record.to_json() | {"effort": watch.as_json()}
    out.result(record, engine_table(built.record), f"{output}: written", *lines, *watch.lines)


@command()
@click.argument("dense", type=FILE)
@click.argument("reduced", type=FILE)
@click.option("--output", "-o", type=FILE, default=None, help="Also write the audit as JSON.")
def audit(dense: Path, reduced: Path, options: AuditOptions, output: Path | None, out: Output) -> int:
    """Count fused attention kernels in engines of both models.

    Exit code 1 if a block's attention is fused in DENSE and not in REDUCED.

    Example: corp-deploy audit dense/model.fp16.onnx reduced/model.fp16.onnx --sm 86 --sm 120
    """
    from corp_deploy.views.engine import audit_table, lost_lines
    from export.engine.audit import audit_fusion, record_of_audits
    from ground.files import write_json

    with out.progress("auditing", None, unit="steps"):
        audits = audit_fusion(dense, reduced, backend=options.backend, sms=options.sm, command=command_line())
    record = record_of_audits(audits, dense=dense.name, reduced=reduced.name)
    if output is not None:
        write_json(output, record)
    out.result(record, audit_table(audits), *lost_lines(audits))
    return 0 if all(each.passed for each in audits) else EXIT_FAILED
