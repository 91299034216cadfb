"""corp-deploy export."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click

from corp_deploy.invocation.export_choice import ExportFiles, ExportOptions
from corp_deploy.invocation.inputs import InputOptions
from corp_deploy.views.console import Output
from ground.precision import PRECISIONS, QUANTISED

from .command import command, some
from .model_choice import ModelChoice
from .options import command_line
from .stopwatch import keep_effort, stopwatch_on


def _record_of(name: str, path: Path, kept: Sequence[str]) -> dict[str, Any]:
    """A graph for people and machines."""
    from corp_deploy.store.onnx_file import facts_of_onnx
    from ground.files import sha256_of_file

    facts = facts_of_onnx(path)
    record: dict[str, Any] = {"path": str(path), "precision": name, "opset": facts.opset}
    if name in QUANTISED:
        record |= {"rest": facts.rest, "scales": facts.scales, "kept_rest": list(kept)}
        record |= {"weight_bits": facts.weight_bits} if facts.weight_bits != 8 else {}
    record |= {"fusion_breaks": list(facts.fusion_breaks)} if facts.fusion_breaks else {}
    record |= {"normalised": facts.normalised} if facts.normalised else {}
    return {**record, "sha256": sha256_of_file(path), "size_bytes": path.stat().st_size}


LOOKED_AT = some(
    *("images", "text", "arrays", "samples", "seed"),
    images="Images for --auto, and for the ranges of int8 and fp8.",
    text="Texts for the same, a line each, of a text encoder.",
    arrays="Arrays for the same, of a model of arrays.",
)


@command(first="model weights output precision opset batch input images auto keep-fp32")
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

    Example: corp-deploy export --model reduced -o reduced/model.onnx --precision fp32,fp16
    """
    from corp_deploy.proof.graphs import Graphs
    from corp_deploy.proof.inputs import inputs_from_set
    from corp_deploy.store.dense_model import model_of_directory
    from corp_deploy.views.engine import graph_lines

    options.require_inputs(inputs.path is not None)
    output, rows = Path(files.output), list[dict[str, Any]]()
    with stopwatch_on() as watch:
        checkpoint = model.load(out)
        feeds = None if inputs.path is None else inputs_from_set(inputs.open(checkpoint)).feeds
        yardstick = None if dense is None else model_of_directory(Path(dense))
        graphs = Graphs(checkpoint, options, feeds, dense=yardstick, where=model.model, command=command_line())
        with out.progress("exporting", len(options.precisions), unit="graphs") as bar, watch.measure("export"):
            for name, path in graphs.paths(output).items():
                rows.append(_record_of(name, path, graphs.write(name, path)))
                bar(len(rows))
    keep_effort(watch, Path(rows[0]["path"]), step="export")
    if options.heads == "ragged":
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded heads keep it")
    kept = {name: found.kept for name, found in graphs.found.items()}
    for name, sites in kept.items():
        if not sites and f".{name}" in output.suffixes:
            out.warn(f"{output}: an {PRECISIONS[name].pure} graph, although its name says {name}")
    every = dict.fromkeys(site for sites in kept.values() for site in sites)
    record = {"written": rows, "kept_fp32": list(every), "effort": watch.as_json()}
    out.result(record, *graph_lines(rows, kept=kept if options.auto else {}), *watch.lines)
