"""corp-deploy export."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import EXPORT, EXPORT_HEADS
from corp_deploy.views.console import Output
from ground.precision import EVERY_WORD, MIXED, PRECISIONS, QUANTISED, FloatType

from .graph_choice import GraphChoice, graph_options
from .input_choice import InputChoice, arrays_option, drawing_options, images_option, input_choice, text_option
from .model_choice import ModelChoice, model_options
from .options import FILE, Words, command_line, explicit_options, output_options, value_options
from .quantised_choice import QuantisedGraphs, YardstickChoice, quantised_options
from .stopwatch import keep_effort, stopwatch_on

if TYPE_CHECKING:
    from corp_deploy.proof.engine_search import Mended
    from corp_deploy.store.checkpoint import Checkpoint
    from corp_deploy.store.quantised_onnx import Quantisation


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """In which precisions graphs are written, and what the mixed ones keep in FP32: sites by pattern, or those found to
    break on inputs, where the dense model's own error in FP16 or BF16 is the yardstick.
    """

    precisions: tuple[str, ...]
    keep_fp32: tuple[str, ...]
    auto: bool
    inputs: InputChoice
    dense: Path | None
    engine: str | None

    def __post_init__(self) -> None:
        if self.mixed and bool(self.keep_fp32) == self.auto:
            raise click.UsageError(f"{' and '.join(self.mixed)} needs either --keep-fp32 PATTERN or --auto")
        given = self.inputs.path is not None
        if self.quantised and not given:
            raise click.UsageError(
                f"{' and '.join(self.quantised)} takes its ranges of real inputs; give --images (or --text)"
            )
        if self.auto and not (self.mixed or self.quantised):
            raise click.UsageError("--auto is for precisions mixed, mixed-bf16, int8 and fp8; give one of them")
        if self.auto != given and not self.quantised:
            raise click.UsageError(
                "--auto looks for the blocks on real images; give --auto and --images (or --text) together"
            )

    @property
    def mixed(self) -> tuple[str, ...]:
        """Those of the precisions that keep sites in FP32."""
        return tuple(name for name in self.precisions if name in MIXED)

    @property
    def quantised(self) -> tuple[str, ...]:
        """Those of the precisions whose ranges are taken of inputs."""
        return tuple(name for name in self.precisions if name in QUANTISED)

    def found(self, checkpoint: "Checkpoint", graphs: "GraphChoice") -> "dict[str, Mended]":
        """The sites that each mixed precision keeps in FP32, and where its engine's fusion is broken."""
        from corp_deploy.families.family import output_ports
        from corp_deploy.proof.engine_search import Mended, engine_answers
        from corp_deploy.proof.inputs import inputs_from_set
        from corp_deploy.proof.mixed_precision import mended_mixed, sites_to_keep
        from corp_deploy.store.dense_model import model_of_directory

        if not self.auto or not self.mixed:
            return {name: Mended(kept=self.keep_fp32) for name in self.mixed}
        feeds = inputs_from_set(self.inputs.open(checkpoint)).feeds
        yardstick = checkpoint if self.dense is None else model_of_directory(self.dense)

        opset, geometry = graphs.opset, graphs.heads

        def found(held_in: FloatType) -> Mended:
            asked: dict[str, Any] = {"opset": opset, "geometry": geometry, "held_in": held_in}
            if self.engine is None:
                return Mended(kept=sites_to_keep(checkpoint, yardstick, feeds, **asked).kept)
            answers = engine_answers(self.engine, feeds, output_ports(checkpoint.model), command_line())
            return mended_mixed(checkpoint, yardstick, feeds, answers, breaks=graphs.break_fusion, **asked)

        return {name: found(PRECISIONS[name].type) for name in self.mixed}

    def paths(self, output: Path, kept: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
        """Where each graph goes: a pure one in place of a mixed one with nothing to keep."""
        from corp_deploy.store.onnx_file import paths_by_precision

        idle = {name: PRECISIONS[name].pure for name, sites in kept.items() if not sites}
        if len(self.precisions) == 1:
            return {idle.get(self.precisions[0], self.precisions[0]): output}
        every = paths_by_precision(output, (*self.precisions, *idle.values()))
        return {name: path for name, path in every.items() if name not in idle}


def _precision_choice(
    precision: tuple[str, ...],
    keep_fp32: tuple[str, ...],
    auto: bool,
    dense: str | None,
    engine: str | None,
    **inputs: Any,
) -> PrecisionChoice:
    searching = (*MIXED, *QUANTISED) if auto else ()
    EXPORT.refuse([("", f"{name}-auto" if name in searching else name) for name in precision], explicit_options())
    return PrecisionChoice(
        precisions=precision,
        keep_fp32=keep_fp32,
        auto=auto,
        inputs=input_choice(**inputs),
        dense=None if dense is None else Path(dense),
        engine=engine,
    )


precision_options = value_options(
    "precision",
    _precision_choice,
    click.option(
        "--precision",
        type=Words(*EVERY_WORD),
        default="fp32",
        show_default=True,
        help="One or several, with commas; mixed is of FP16, mixed-bf16 of BF16; int8 and fp8 take ranges of --images.",
    ),
    click.option(
        "--keep-fp32",
        multiple=True,
        help="Modules that mixed graphs keep in FP32, with all below them, such as blocks.7.",
    ),
    click.option(
        "--auto",
        is_flag=True,
        help="Let mixed, int8 and fp8 graphs find the blocks that break, on --images, and leave those as they are.",
    ),
    images_option(help="Images for --auto, and for the ranges of int8 and fp8."),
    text_option(help="Texts for the same, a line each, of a text encoder."),
    arrays_option(help="Arrays for the same, of a model of arrays."),
    *drawing_options,
    click.option(
        "--dense", default=None, help="For --auto: the dense model's directory; its own error is the yardstick."
    ),
    click.option(
        "--engine",
        type=click.Choice(["tensorrt", "tensorrt-rtx"]),
        default=None,
        help="For --auto: judge engines, built and run here on a GPU, in place of the graphs; where a fused kernel is "
        "wrong, fusion is broken before blocks are kept in more bits.",
    ),
)


def _written(checkpoint: "Checkpoint", name: str, path: Path, found: "Mended", graphs: GraphChoice) -> dict[str, Any]:
    """Write one graph; what it is, for people and machines."""
    from corp_deploy.store.onnx_file import export_checkpoint, facts_of_onnx
    from ground.files import sha256_of_file

    export_checkpoint(
        checkpoint,
        path,
        precision=name,
        opset=graphs.opset,
        batch=graphs.batch,
        keep_fp32=found.kept,
        geometry=graphs.heads,
        breaks=(*graphs.break_fusion, *found.breaks),
        graph_input=graphs.graph_input,
    )
    facts = facts_of_onnx(path)
    record = {"path": str(path), "precision": name, "opset": facts.opset}
    record |= {"fusion_breaks": list(facts.fusion_breaks)} if facts.fusion_breaks else {}
    record |= {"normalised": facts.normalised} if facts.normalised else {}
    return {**record, "sha256": sha256_of_file(path), "size_bytes": path.stat().st_size}


def _found_for(name: str, found: "Mapping[str, Mended]") -> "Mended":
    """What was found for a precision, or for the mixed one in whose place it is written."""
    from corp_deploy.proof.engine_search import Mended

    own = [each for mixed, each in found.items() if mixed == name or (not each.kept and PRECISIONS[mixed].pure == name)]
    return own[0] if own else Mended()


def _yardstick(precision: PrecisionChoice) -> "YardstickChoice":
    return YardstickChoice(searches=precision.auto, dense=precision.dense, engine=precision.engine)


@click.command("export")
@model_options
@click.option(
    "--output",
    "-o",
    type=FILE,
    required=True,
    help="ONNX file to write; of several precisions fp32 goes there, others to NAME.fp16.onnx and so on beside it.",
)
@precision_options
@quantised_options
@graph_options
@output_options
def export_command(
    model: ModelChoice,
    output: Path,
    precision: PrecisionChoice,
    quantisation: "Quantisation",
    graphs: GraphChoice,
    out: Output,
) -> None:
    """Write typed ONNX graphs of a dense or reduced model.

    Example: corp-deploy export --model reduced -o reduced/model.onnx --precision fp32,fp16
    """
    from corp_deploy.families.family import sites_of
    from corp_deploy.store.graph_input import graph_ports
    from corp_deploy.views.graphs import graph_lines

    rows: list[dict[str, Any]] = []
    with stopwatch_on() as watch:
        checkpoint = model.load(out)
        uneven = any(site.qk != site.v for site in sites_of(checkpoint.model).heads)
        EXPORT_HEADS.refuse([(model.model, "uneven" if uneven else "even")], explicit_options())
        graph_ports(checkpoint, graphs.graph_input)
        quantised = None
        if precision.quantised:
            quantised = QuantisedGraphs(checkpoint, precision.inputs, quantisation, graphs, _yardstick(precision))
        with out.progress("exporting", len(precision.precisions), unit="graphs") as done, watch.of("export"):
            found = precision.found(checkpoint, graphs)
            kept = {name: each.kept for name, each in found.items()}
            for name, path in precision.paths(output, kept).items():
                if quantised is not None and name in QUANTISED:
                    rows.append(quantised.written(name, path))
                else:
                    rows.append(_written(checkpoint, name, path, _found_for(name, found), graphs))
                done(len(rows))
    keep_effort(watch, Path(rows[0]["path"]), step="export")
    if graphs.heads == "ragged":
        out.warn("ragged heads lose the fused attention kernel in TensorRT engines; padded heads keep it")
    for name, sites in kept.items():
        if not sites and f".{name}" in output.suffixes:
            out.warn(f"{output}: an {PRECISIONS[name].pure} graph, although its name says {name}")
    every = dict.fromkeys(site for sites in kept.values() for site in sites)
    record = {"written": rows, "kept_fp32": list(every), "effort": watch.as_json()}
    out.result(record, *graph_lines(rows, kept=kept if precision.auto else {}), *watch.lines)
