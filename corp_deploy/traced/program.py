"""A model's program: the graph of its calls to ATen, traced once, flat, under the names of its state dict."""

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from ground.errors import BadInput

from .folding import fold_

Inputs = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A traced model; `graph` runs it and has its parameters, those that were computed folded into constants.

    `model`: the class it was traced from. `any_batch`: whether it runs at any batch, or at that of the example alone.
    `folded`: the constants that stand for what was computed from parameters.
    """

    graph: fx.GraphModule
    model: str
    any_batch: bool
    folded: tuple[str, ...]

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """In order of the program."""
        return iter(self.graph.graph.nodes)

    def tensor(self, name: str) -> Tensor:
        """A parameter or constant by its name."""
        owner, _, last = name.rpartition(".")
        value = getattr(self.graph.get_submodule(owner), last)
        assert isinstance(value, Tensor), (name, type(value))
        return value


def operation(node: fx.Node) -> str:
    """`linear` of `aten.linear.default`, `getitem` of the Python operator; other nodes by what they are."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return str(getattr(node.target, "__name__", node.target))


def module_of(node: fx.Node) -> tuple[str, str]:
    """The path and the class of the innermost module that a node was called in."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else kind.__name__
    return str(path).split("@")[0], kind.rpartition(".")[2]


def sizes_at_one(node: fx.Node) -> Any:
    """The shape of what a node gives at a batch of 1; a tuple of them where it gives several tensors; else None."""
    return _sizes(node.meta.get("val"))


def number_of(node: fx.Node) -> int | None:
    """The size that a node gives at a batch of 1; None for a tensor."""
    value = node.meta.get("val")
    return _at_one(value) if isinstance(value, int | torch.SymInt) else None


def _sizes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(map(_at_one, value.shape))
    return tuple(map(_sizes, value)) if isinstance(value, list | tuple) else None


def _at_one(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return 1 if expression.is_Symbol else int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))


def trace(model: nn.Module, inputs: Inputs) -> Program:
    """The program of a model in eval mode, on meta or anywhere; example inputs of a batch of 2 or more, in order or by
    name. Raises BadInput for a model that can't be traced.
    """
    program, any_batch = _exported(model.eval(), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = program.module(check_guards=False)
    assert isinstance(graph, fx.GraphModule), type(graph)
    graph.requires_grad_(False)
    _without_changes_(graph.graph)
    _drop_checks_(graph.graph)
    _without_views_(graph)
    return Program(graph=graph, model=type(model).__name__, any_batch=any_batch, folded=fold_(graph))


def _exported(model: nn.Module, inputs: Inputs) -> tuple[ExportedProgram, bool]:
    """For any batch if that can be, else for that of the inputs."""
    try:
        return _export(model, inputs, any_batch=True), True
    except Exception:
        try:
            return _export(model, inputs, any_batch=False), False
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise BadInput(
                f"{type(model).__name__} can't be traced: {reason}. (a) Are these all of its inputs, as it takes them? "
                "(b) Does it take images of a fixed size? (c) Control flow that looks at values can't be traced: "
                "give a module without it"
            ) from error


def _export(model: nn.Module, inputs: Inputs, *, any_batch: bool) -> ExportedProgram:
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    shapes = torch.utils._pytree.tree_map(_batch, kwargs or args) if any_batch else None
    with _plain_attention(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        return program.run_decompositions({}) if _changes_a_view(program.graph) else program


def _batch(value: Any) -> dict[int, Any] | None:
    return {0: Dim.AUTO} if isinstance(value, Tensor) and value.dim() else None


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without the fast paths of nn.MultiheadAttention and nn.TransformerEncoder, which are one op each."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _changes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The calls that change their first argument in place, and that."""
    return [
        (node, node.args[0])
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.args and isinstance(node.args[0], fx.Node)
    ]


def _changes_a_view(graph: fx.Graph) -> bool:
    """Whether something is changed in place that is seen through something else too."""
    return any(_is_view(changed) or any(map(_is_view, changed.users)) for _, changed in _changes(graph))


def _is_view(node: fx.Node) -> bool:
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    is_other = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return is_other or node.target is operator.getitem


def _without_changes_(graph: fx.Graph) -> None:
    """What is behind a change in place takes what the change gives."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node, changed in _changes(graph):
        for user in [user for user in changed.users if order[user] > order[node]]:
            user.replace_input_with(changed, node)


def _without_views_(graph: fx.GraphModule) -> None:
    """Whether a tensor can be seen as another shape depends on where it was made: an attention on another device gives
    other strides. A copy where it can't be is the same numbers.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()


def _drop_checks_(graph: fx.Graph) -> None:
    """Checks of inputs are torch's own; they know the dense sizes."""
    for node in reversed(graph.nodes):
        if operation(node).startswith(("_assert", "sym_constrain", "_guards")) or node.op == "call_module":
            graph.erase_node(node)
    graph.eliminate_dead_code()
