"""corp_deploy.export."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from corp_deploy.families.family import sites_of
from corp_deploy.families.head_attention import Geometry
from corp_deploy.invocation.table import EXPORT_HEADS
from corp_deploy.proof.inputs import inputs_from_set
from corp_deploy.proof.mixed_precision import sites_to_keep
from corp_deploy.proof.pixels import fed_to_graph
from corp_deploy.proof.quantised_precision import bounds_of, sites_to_leave
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.graph_input import GraphInput
from corp_deploy.store.onnx_file import export_checkpoint, facts_of_onnx
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised, quantiser_of
from export.graph.quantiser import ScaleChoice
from ground.errors import BadInput
from ground.feeds import Feeds
from ground.files import sha256_of_file
from ground.precision import EVERY_WORD, MIXED, PRECISIONS, QUANTISED

from .inputs import InputsLike, opened_inputs
from .source import ModelLike, PathLike, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """An ONNX file: `path`, which `os.fspath` gives too, its precision and operator set, its digest and bytes, the
    multiply-adds of one input, and the modules that were kept in more bits than its precision has.
    """

    path: Path
    precision: str
    opset: int
    sha256: str
    size_bytes: int
    macs: int | None
    kept: tuple[str, ...] = ()

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """One graph as it is asked for. Raises BadInput for what its precision would ignore or lacks."""

    precision: str
    opset: int | None
    batch: int | None
    heads: Geometry | None
    graph_input: GraphInput
    break_fusion: tuple[str, ...]
    keep_fp32: tuple[str, ...]
    quantisation: Quantisation
    auto: bool
    has_inputs: bool

    def __post_init__(self) -> None:
        mixed, quantised = self.precision in MIXED, self.precision in QUANTISED
        if self.precision not in EVERY_WORD:
            raise BadInput(f"precision is {self.precision!r:.50}, expected one of {', '.join(EVERY_WORD)}")
        if mixed and bool(self.keep_fp32) == self.auto:
            raise BadInput(f"precision {self.precision} needs either keep_fp32, modules by pattern, or auto=True")
        if quantised and not self.has_inputs:
            raise BadInput(f"precision {self.precision} takes its ranges of real inputs; give inputs")
        if self.auto and not (mixed or quantised):
            raise BadInput(f"auto is for precisions {', '.join((*MIXED, *QUANTISED))}, got {self.precision}")
        if self.auto and not self.has_inputs:
            raise BadInput("auto looks for the modules that break on real inputs; give inputs")
        if self.has_inputs and not (self.auto or quantised):
            raise BadInput(f"inputs are for int8, fp8 and auto, got precision {self.precision}; leave them out")
        if self.keep_fp32 and not mixed:
            raise BadInput(f"keep_fp32 is for precisions {', '.join(MIXED)}, got {self.precision}")
        if self.quantisation.weight_bits != 8 and self.precision != "int8":
            raise BadInput(f"weight_bits is for int8, got {self.precision}; leave it out")
        if self.quantisation != Quantisation() and not quantised:
            raise BadInput(f"rest, scales, balance and keep_rest are for int8 and fp8, got {self.precision}")


def _plain(asked: _Export, model: Checkpoint, yardstick: Checkpoint, feeds: Feeds | None, path: Path) -> Sequence[str]:
    """Write a graph of floats; the modules that it keeps in float32."""
    precision, kept = PRECISIONS[asked.precision], asked.keep_fp32
    if asked.auto:
        assert feeds is not None, asked
        how = {"opset": asked.opset, "geometry": asked.heads}
        kept = sites_to_keep(model, yardstick, feeds, held_in=precision.type, **how).kept  # type: ignore[arg-type]
    export_checkpoint(
        model,
        path,
        precision=precision.name if kept else precision.pure,
        opset=asked.opset,
        batch=asked.batch,
        keep_fp32=kept,
        geometry=asked.heads,
        breaks=asked.break_fusion,
        graph_input=asked.graph_input,
    )
    return kept


def _quantised(asked: _Export, model: Checkpoint, yardstick: Checkpoint, feeds: Feeds, path: Path) -> Sequence[str]:
    """Write a graph of integers or of FP8; the modules that it does not quantise."""
    fed, chosen = fed_to_graph(model, feeds, asked.graph_input), asked.quantisation
    made_of = quantiser_of(
        model,
        fed,
        chosen,
        opset=asked.opset,
        batch=asked.batch,
        geometry=asked.heads,
        graph_input=asked.graph_input,
    )
    if asked.auto:
        bounds = bounds_of(yardstick, asked.precision, feeds)
        found = sites_to_leave(model, made_of, asked.precision, chosen, fed, bounds, batch=asked.batch)
        chosen = replace(chosen, keep_rest=(*chosen.keep_rest, *found.sites))
    export_quantised(made_of, path, precision=asked.precision, chosen=chosen, breaks=asked.break_fusion)
    return chosen.keep_rest


def export(
    model: ModelLike,
    output: PathLike,
    *,
    precision: str = "fp32",
    opset: int | None = None,
    batch: int | None = None,
    heads: Geometry | None = None,
    graph_input: GraphInput = "float32",
    break_fusion: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
    auto: bool = False,
    dense: ModelLike | None = None,
    inputs: InputsLike | None = None,
    samples: int | None = None,
    seed: int = 0,
    rest: str = "fp16",
    scales: ScaleChoice = "auto",
    balance: bool = True,
    keep_rest: Sequence[str] = (),
    weight_bits: int = 8,
) -> Graph:
    """Write a dense or reduced model as one typed ONNX file, whose inputs and outputs are float32 in every precision.

    `precision`: fp32, fp16, bf16, mixed or mixed-bf16 (with `keep_fp32`, modules by pattern, or `auto`), int8 or fp8
    (with `inputs` to take ranges of; `rest`, `scales`, `balance`, `keep_rest`, and `weight_bits` of int8, as `export`
    has them). `auto` looks on `inputs` for the modules that must stay in more bits, until the graph errs no more than a
    multiple of what that type does to the `dense` model (by default to the model itself). `graph_input` "uint8" lets
    the graph take pixels; `batch` fixes the batch; `heads` replaces the head geometry. Of `inputs`, `samples` are drawn
    by `seed`.

    Raises BadInput for options that the precision would ignore or lacks, for a model that can't be typed so, and for
    a graph that fails ONNX's or our own check; nothing is written then.
    """
    path = Path(output)
    asked = _Export(
        precision=precision,
        opset=opset,
        batch=batch,
        heads=heads,
        graph_input=graph_input,
        break_fusion=tuple(break_fusion),
        keep_fp32=tuple(keep_fp32),
        quantisation=Quantisation(
            rest=rest, scales=scales, balance=balance, keep_rest=tuple(keep_rest), weight_bits=weight_bits
        ),
        auto=auto,
        has_inputs=inputs is not None,
    )
    with ExitStack() as stack:
        own = stack.enter_context(opened(model))
        uneven = any(site.qk != site.v for site in sites_of(own.model).heads)
        EXPORT_HEADS.refuse([("the model", "uneven" if uneven else "even")], {} if heads is None else {"heads": heads})
        yardstick = own if dense is None else stack.enter_context(opened(dense))
        feeds = None
        if inputs is not None:
            given = stack.enter_context(opened_inputs(own.model, inputs, samples=samples, seed=seed))
            feeds = inputs_from_set(given).feeds
        if precision in QUANTISED:
            assert feeds is not None, asked
            kept = _quantised(asked, own, yardstick, feeds, path)
        else:
            kept = _plain(asked, own, yardstick, feeds, path)
    facts = facts_of_onnx(path)
    return Graph(
        path=path,
        precision=facts.precision,
        opset=facts.opset,
        sha256=sha256_of_file(path),
        size_bytes=path.stat().st_size,
        macs=facts.macs,
        kept=tuple(kept),
    )
