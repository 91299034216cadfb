"""A graph of the ATen calls that a model makes on meta tensors, recorded at two batch sizes to tell batch axes apart.

The graph is that of torch.export, in a tenth of its time, for models whose code doesn't look at values: torch.export
keeps a symbol for every size and computes with symbols at every call. A meta copy runs, not the model itself.
"""

import inspect
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _compiling_state_context as exporting
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_structure, tree_unflatten

from .program import copy_to_meta
from .recorder import KeepNumbersOffMeta, RecordedCall, Recorder, Ref
from .sizes import BATCHES, BatchAffineSize, BatchDependentProgram, inputs_at_batch, set_sizes, size_from_batches

RESERVED_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""Attributes of every GraphModule; a model's tensors and modules of these names are renamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """One recorded run: calls, constants and inputs by name, and in `gives` the model's outputs, tensors as Ref."""

    calls: Sequence[RecordedCall]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    gives: Any


def record_graph(model: nn.Module, args: tuple[Any, ...]) -> fx.GraphModule:
    """Record a model's graph for any batch size, with the model's own parameters.

    Each node's `meta` has its result on the meta device (`val`), the result's sizes (`sizes`) and the modules around
    the call (`nn_module_stack`). Raises BatchDependentProgram, or any error of model code that looks at values.
    """
    names, running, (one, two) = _names(model, args), copy_to_meta(model), BATCHES
    first = _run(model, running, inputs_at_batch(args, one), names)

    def build_graph(running: nn.Module) -> fx.GraphModule:
        other = _run(model, running, inputs_at_batch(args, two), names)
        return _GraphBuilder(model, first, other).build(args, names)

    with suppress(Exception):  # some models keep tables from their first call; a fresh copy follows
        return build_graph(running)
    return build_graph(copy_to_meta(model))


def _names(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    try:
        bound = inspect.signature(model.forward).bind_partial(*args)
    except (TypeError, ValueError):
        return [f"arg_{place}" for place in range(len(args))]
    names = list[str]()
    for name, value in bound.arguments.items():
        several = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{place}" for place in range(len(value))] if several else [name]
    return names


def _run(model: nn.Module, running: nn.Module, args: tuple[Any, ...], names: Sequence[str]) -> _Recorded:
    named_leaves: dict[str, Any] = {}
    for name, value in zip(names, args, strict=True):
        leaves = tree_leaves(value)
        named_leaves |= {name if len(leaves) == 1 else f"{name}_{place}": leaf for place, leaf in enumerate(leaves)}
    tensors = {name: each for name, each in named_leaves.items() if isinstance(each, Tensor)}
    own = {f".{name}": each for name, each in _named_tensors(running)}
    on_meta = bool(own) and all(each.is_meta for _, each in _named_tensors(model))
    with track_modules(running) as stack:
        recorder = Recorder({**own, **tensors}, stack, on_meta=on_meta)
        # While torch says that it exports, models leave out checks of values.
        with torch.no_grad(), exporting(), KeepNumbersOffMeta(), enable_python_dispatcher(), recorder:
            gives = running(*args)
    return _Recorded(
        calls=recorder.calls,
        constants=recorder.constants,
        inputs=named_leaves,
        gives=tree_map_only(Tensor, recorder.ref, gives),
    )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of every parameter and buffer; shared ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def track_modules(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that always has the modules that are running, outermost first, each as its path and class."""
    stack = list[tuple[str, str]]()
    paths = {id(module): path for path, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        kind = type(module)
        if id(module) in paths:
            stack.append((paths[id(module)], f"{kind.__module__}.{kind.__qualname__}"))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in paths:
            stack.pop()

    with hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave):
        yield stack


def _graph_name(name: str) -> str:
    """Return a dotted name; a first part that is an attribute of every GraphModule, such as `meta`, gets a `_`."""
    first, *rest = name.split(".")
    return ".".join((f"{first}_" if first in RESERVED_NAMES else first, *rest))


class _GraphBuilder:
    """A builder of one graph from the runs that were recorded at two batch sizes."""

    def __init__(self, model: nn.Module, first: _Recorded, other: _Recorded) -> None:
        if len(first.calls) != len(other.calls) or first.constants.keys() != other.constants.keys():
            raise BatchDependentProgram(f"{len(first.calls)} calls at one batch size, {len(other.calls)} at the other")
        for name, each in first.constants.items():
            beside = other.constants[name]
            if not (each.shape == beside.shape if each.is_meta else torch.equal(each, beside)):
                raise BatchDependentProgram(f"{name}, whose values differ between batch sizes")
        self.first, self.other = first, other
        self.root: dict[str, Tensor] = {}
        for name, each in _named_tensors(model):
            is_parameter = isinstance(each, nn.Parameter)
            if (own := _graph_name(name)) in self.root:
                raise BatchDependentProgram(f"two tensors that a graph would both name {own}")
            self.root[own] = nn.Parameter(each.detach(), requires_grad=False) if is_parameter else each
        self.device = next((each.device for each in self.root.values()), torch.device("cpu"))
        for name, each in first.constants.items():  # a meta model's weights are loaded later, constants are not
            self.root[name] = each if self.device.type == "meta" else each.to(self.device)
        self.graph = fx.Graph()
        self.nodes: dict[Ref, fx.Node] = {}
        self.numbers: dict[BatchAffineSize, fx.Node] = {}

    def build(self, args: tuple[Any, ...], names: list[str]) -> fx.GraphModule:
        for name, value in self.first.inputs.items():
            node = self.nodes[Ref(name)] = self.graph.placeholder(name)
            set_sizes(node, value, self.other.inputs[name])
        used = tree_leaves([call.args for call in self.first.calls] + [self.first.gives])
        # The model's tensors stand in front of all calls.
        for source in dict.fromkeys(each.source for each in used if isinstance(each, Ref)):
            if isinstance(source, str) and Ref(source) not in self.nodes:
                target = _graph_name(source[1:]) if source.startswith(".") else source
                node = self.nodes[Ref(source)] = self.graph.get_attr(target)
                set_sizes(node, self.root[target], self.root[target])
        for number, (one, other) in enumerate(zip(self.first.calls, self.other.calls, strict=True)):
            self._call(number, one, other)
        gives = self._both(self.first.gives, self.other.gives)
        leaves, spec = tree_flatten(gives)
        self.graph.output(tuple(leaves))
        self.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, tree_structure((args, {})), spec)))
        return fx.GraphModule(self.root, self.graph).eval()

    def _call(self, number: int, one: RecordedCall, other: RecordedCall) -> None:
        if one.target is not other.target or one.stack != other.stack:
            raise BatchDependentProgram(f"{one.target} at one batch size, {other.target} at the other")
        args, kwargs = self._both(one.args, other.args)
        stack = OrderedDict((path or "model", (_graph_name(path), kind)) for path, kind in one.stack)
        name = one.target._schema.name.rpartition("::")[2]
        node = self.nodes[Ref(number)] = self.graph.create_node("call_function", one.target, args, kwargs, name)
        node.meta["nn_module_stack"] = stack
        set_sizes(node, one.gives, other.gives)
        if isinstance(one.gives, list | tuple):
            for place, (each, beside) in enumerate(zip(one.gives, other.gives, strict=True)):
                part = self.nodes[Ref(number, place)] = self.graph.call_function(operator.getitem, (node, place))
                part.meta["nn_module_stack"] = stack
                set_sizes(part, each, beside)

    def _both(self, one: Any, other: Any) -> Any:
        """Merge the arguments of both runs, with nodes for tensors and for numbers that depend on the batch."""
        leaves, spec = tree_flatten(one)
        others, again = tree_flatten(other)
        if spec != again:
            raise BatchDependentProgram("arguments that are nested differently at the two batch sizes")
        return tree_unflatten(list(map(self._leaf, leaves, others)), spec)

    def _leaf(self, one: Any, other: Any) -> Any:
        if isinstance(one, Ref) and one == other:
            return self.nodes[one]
        if isinstance(one, torch.device) and one.type == "meta":
            return self.device
        if type(one) is int and type(other) is int:
            size = size_from_batches(one, other)
            return size if isinstance(size, int) else self._number(size)
        if type(one) is not type(other) or not (one == other or (one != one and other != other)):
            raise BatchDependentProgram(f"{one} at one batch size, {other} at the other")
        return one

    def _number(self, size: BatchAffineSize) -> fx.Node:
        if size not in self.numbers:
            if size == BatchAffineSize(1):
                images = next(node for node in self.graph.nodes if node.meta["sizes"] and node.op == "placeholder")
                node = self.graph.call_function(torch.ops.aten.sym_size.int, (images, 0))
            elif size.more:
                node = self.graph.call_function(operator.add, (self._number(BatchAffineSize(size.times)), size.more))
            else:
                node = self.graph.call_function(operator.mul, (self._number(BatchAffineSize(1)), size.times))
            set_sizes(node, *map(size.at, BATCHES))
            self.numbers[size] = node
        return self.numbers[size]
