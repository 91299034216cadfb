"""Tracing of a model into a program: by recording its calls, or else by torch.export."""

import operator
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.utils._pytree import tree_map

from ground.errors import BadInput

from .folding import fold_constants_, replace_means_
from .program import Program, copy_module, operation
from .recording import record_graph
from .sizes import BatchAffineSize, changes_in_place


def trace(model: nn.Module, inputs: Sequence[Any]) -> Program:
    """Trace a model, set to eval mode, with example inputs of a batch of 2 or more; raise BadInput if that fails."""
    graph, any_batch = _graph(model.eval(), tuple(inputs))
    graph.requires_grad_(False)
    _replace_in_place_ops_(graph.graph)
    _remove_checks_(graph.graph)
    _simplify_tensor_references_(graph.graph)
    replace_means_(graph)
    return Program(graph=graph, model=type(model).__name__, any_batch=any_batch, folded=fold_constants_(graph))


def _graph(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[fx.GraphModule, bool]:
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The fast paths of nn.MultiheadAttention and nn.TransformerEncoder are single ops, which no rule covers.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        with suppress(Exception):  # if the model's own code fails, torch.export tells the reason
            return record_graph(model, inputs), True
        with suppress(Exception):
            return _exported(model, inputs, any_batch=True), True
        try:
            return _exported(model, inputs, any_batch=False), False
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise BadInput(
                f"{type(model).__name__} can't be traced: {reason}. (a) Are these all of its inputs, as it takes them? "
                "(b) Does it take images of a fixed size? (c) Control flow that looks at values can't be traced: "
                "give a module without it"
            ) from error


def _exported(model: nn.Module, inputs: tuple[Any, ...], *, any_batch: bool) -> fx.GraphModule:
    shapes = None
    if any_batch:
        shapes = tree_map(lambda each: {0: Dim.AUTO} if isinstance(each, Tensor) and each.dim() else None, inputs)
    with torch.no_grad():
        program = export(copy_module(model), inputs, dynamic_shapes=shapes, strict=False)
        changed = [each for _, each in _changes(program.graph)]
        if any(map(_is_view, (*changed, *(user for each in changed for user in each.users)))):
            program = program.run_decompositions({})  # a change is visible through a view
    graph = program.module(check_guards=False)
    assert isinstance(graph, fx.GraphModule), type(graph)
    for node in graph.graph.nodes:
        node.meta["sizes"] = _sizes(node.meta.get("val"))
    return graph


def _sizes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(map(_sizes, value.shape))
    if isinstance(value, list | tuple):
        return tuple(map(_sizes, value))
    if not isinstance(value, torch.SymInt):
        return value if isinstance(value, int) else None
    one, two = (int(value.node.expr.subs(dict.fromkeys(value.node.expr.free_symbols, batch))) for batch in (1, 2))
    return BatchAffineSize(two - one, one - (two - one))


def _simplify_tensor_references_(graph: fx.Graph) -> None:
    """Rewrite type_as, expand_as and view so that they depend on no other tensor's elements and on no strides."""
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.args else None
        if node.target is torch.ops.aten.view.default:
            # An attention on another device gives other strides, so that a view may fail there; a reshape copies then.
            node.target = torch.ops.aten.reshape.default
        elif operation(node) == "type_as" and source.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif operation(node) == "expand_as":
            before = (1,) * (len(node.meta["sizes"]) - len(source.meta["sizes"])) + tuple(source.meta["sizes"])
            sizes = [-1 if was == now else now for was, now in zip(before, node.meta["sizes"], strict=True)]
            if all(isinstance(size, int) for size in sizes):  # no expanded size depends on the batch
                node.target, node.args = torch.ops.aten.expand.default, (source, sizes)


def _changes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    calls = [node for node in graph.nodes if changes_in_place(node) and node.args]
    return [(node, node.args[0]) for node in calls if isinstance(node.args[0], fx.Node)]


def _is_view(node: fx.Node) -> bool:
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    is_other = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return is_other or node.target is operator.getitem


def _replace_in_place_ops_(graph: fx.Graph) -> None:
    """Let later users of a tensor changed in place read the op's result; make pointwise ops out-of-place."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node, changed in _changes(graph):
        for user in [user for user in changed.users if order[user] > order[node]]:
            user.replace_input_with(changed, node)
        node.target = _out_of_place(node.target)  # type: ignore[arg-type]


def _out_of_place(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the twin of a pointwise ATen op that gives a new tensor, such as relu for relu_, or the op itself."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten" or torch.Tag.pointwise not in op.tags or not name.endswith("_"):
        return op
    other = getattr(torch.ops.aten, name.removesuffix("_"))
    return getattr(other, op._overloadname) if op._overloadname in other.overloads() else op


def _remove_checks_(graph: fx.Graph) -> None:
    """Remove the checks and guards that torch.export adds, which expect the dense model's sizes, and dead code."""
    for node in reversed(graph.nodes):
        if operation(node).startswith(("_assert", "sym_constrain", "_guards")) or node.op == "call_module":
            graph.erase_node(node)
    graph.eliminate_dead_code()
