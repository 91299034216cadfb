"""The function corp_deploy.export."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from corp_deploy.invocation.export_choice import ExportFiles, ExportOptions
from corp_deploy.invocation.input_choice import Drawn
from corp_deploy.proof.graphs import Graphs
from corp_deploy.proof.model_inputs import inputs_from_set
from corp_deploy.store.graph_facts import facts_of_graph
from ground.errors import BadInput
from ground.files import sha256_of_file

from .in_python import function_from_record
from .models import ModelLike, OfModel, Written, open_inputs, open_model
from .values import InputsLike, given_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph(Written):
    """An ONNX file or a package of AOTInductor, by its `path`, which `os.fspath` returns too.

    `opset` is 0 for a package, `macs` are the multiply-adds of one input; `kept` are the modules that keep a higher
    precision.
    """

    precision: str
    opset: int
    sha256: str
    size_bytes: int
    macs: int | None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportCall(Drawn, ExportOptions, ExportFiles, OfModel):
    """The parameters of `export`."""

    dense: ModelLike | None = None
    inputs: InputsLike | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_inputs(self.inputs is not None)
        if len(self.precisions) > 1:
            raise BadInput(f"precision is {self.precisions}, expected one: a call writes one graph")


@function_from_record(ExportCall)
def export(call: ExportCall) -> Graph:
    """Write a dense or reduced model as one typed ONNX file, whose inputs and outputs are float32 in every precision.

    `format="aoti"` compiles the same program to a package of AOTInductor, for this kind of machine.

    `auto` finds, on `inputs`, the modules that need a higher precision, until the graph errs no more than a multiple of
    what rounding to the type does to the `dense` model (by default to the model itself).

    Raises BadInput for options that the precision would ignore or lacks, for a model that can't be typed so, and for
    a graph that fails ONNX's or our own check; Missing for a package without a C++ compiler or the GPU; nothing is
    written then.
    """
    path = Path(call.output)
    call.require_suffix(path)
    with ExitStack() as stack:
        given = None if call.inputs is None else given_inputs(call.inputs)
        own = stack.enter_context(open_model(call.model, given))
        dense = None if call.dense is None else stack.enter_context(open_model(call.dense, given))
        feeds = None
        if given is not None:
            feeds = inputs_from_set(open_inputs(own.model, given, **call.drawn)).feeds
        graphs = Graphs(own, call, feeds, dense=dense)
        (name,) = graphs.paths(path)
        kept = graphs.write(name, path)
    facts = facts_of_graph(path)
    return Graph(
        path=path,
        precision=facts.precision,
        opset=facts.opset,
        sha256=sha256_of_file(path),
        size_bytes=path.stat().st_size,
        macs=facts.macs,
        kept=tuple(kept),
    )
