"""A rewriter of a program that leaves out removed elements: it selects parts of parameters and adapts sizes."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from corp_deploy.traced.finding.flow import Call, Flow, make_call
from corp_deploy.traced.finding.labels import (
    LabelTensor,
    Uneven,
    compact,
    keep_mask,
    loses_elements,
    place_along,
    remove_labels,
    select_kept,
)
from corp_deploy.traced.finding.moves import axis_order, is_move, path_to
from corp_deploy.traced.finding.pointwise import is_pointwise
from corp_deploy.traced.programs.program import SHAPED, Program, module_of, operation
from corp_deploy.traced.programs.subprogram import evaluate_nodes

from .resizing import CUTS, Arguments, aten, gives_remaining, resize_call, sizes_to_reshape


class NarrowingRefused(Exception):
    """The error of a node at which the program can't be narrowed."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{operation(node)} in {module_of(node)[0] or 'the model'}: {reason}")
        self.node = node


Parts = dict[str, tuple[str, Tensor | None]]
"""The dense tensor's name and the mask of what is left, None for all, by name of a narrowed program's tensor."""


def remove_elements(program: Program, flow: Flow, gone: Tensor) -> tuple[fx.GraphModule, Parts]:
    """Return the graph of a program without the labels of the mask `gone` [labels], and its Parts.

    Raises NarrowingRefused.
    """
    new = _Narrowing(program, flow, gone)
    for node in program.nodes:
        if node.op == "call_function" and new.is_narrower(node):
            new.narrow(node)
        elif node.op != "get_attr":
            new.copy(node)
    new.graph.eliminate_dead_code()
    new.graph.lint()
    new.graph.set_codegen(copy(program.graph.graph._codegen))
    return fx.GraphModule(new.tensors, new.graph).eval(), new.parts


def kept_part(tensor: Tensor, keep: Tensor | None) -> Tensor:
    """Return what a mask keeps of a parameter or constant, all for None; a parameter stays one."""
    new = tensor.detach() if keep is None else select_kept(tensor.detach(), keep)
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


@dataclass(slots=True)
class _Narrowing:
    """A rewriter of a program without the labels of the mask `gone` [labels].

    `nodes`: the new node of each dense one. `uneven`: moves whose remaining elements form no tensor, such as those of
    queries beside wider values; later moves that pick a part rebuild it alone. `tensors`: the remaining parameters by
    name. `parts`: see Parts. `names`: the name of each remaining parameter by the dense one's and the kept mask.
    """

    program: Program
    flow: Flow
    gone: Tensor
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    uneven: dict[fx.Node, None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    names: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def is_narrower(self, node: fx.Node) -> bool:
        """Check whether a node or its inputs lose elements, or an input is uneven."""
        if not self.uneven.keys().isdisjoint(node.all_input_nodes):
            return True
        values = [self.flow.values.get(each) for each in (node, *node.all_input_nodes)]
        used = (self.flow.groups.of(use.labels) for use in self.flow.constants_of(node))
        return any(loses_elements(value, self.gone) for value in values) or any(
            not bool(keep_mask(labels, self.gone).all()) for labels in used
        )

    def copy(self, node: fx.Node) -> None:
        def entering(each: fx.Node) -> fx.Node:
            if each in self.uneven:
                raise NarrowingRefused(node, "its remaining elements form no tensor")
            return self.constant(each, None) if each.op == "get_attr" else self.nodes[each]

        self.nodes[node] = _of_module(self.graph.node_copy(node, entering), node)

    def narrow(self, node: fx.Node) -> None:
        """Rewrite a node that loses elements, by itself or its inputs; note in `uneven` a move that forms no tensor."""
        try:
            if any(each in self.uneven for each in node.all_input_nodes):
                self.part(node)
            elif operation(node) == "getitem":
                self.pick(node)
            elif operation(node) == "unbind":
                self.copy(node)
            else:
                self.resize(node)
        except (Uneven, RuntimeError) as error:
            if not is_move(node):
                raise NarrowingRefused(node, f"its remaining elements form no tensor, {error}") from error
            self.uneven[node] = None

    def resize(self, node: fx.Node) -> None:
        call, value = make_call(node, self.flow.values), self.flow.values[node]
        target, arguments = resize_call(call, value, self.gone)
        if not gives_remaining(call, target, arguments, value, self.gone):
            if is_move(node):
                raise Uneven("its op would move the remaining elements to other places")
            raise NarrowingRefused(node, "its op would move the remaining elements to other places")

        def entering(each: fx.Node) -> fx.Node:
            return self.constant(each, self.mask(call, each)) if each.op == "get_attr" else self.nodes[each]

        self.nodes[node] = self.call(node, target, fx.map_arg(arguments, entering))

    def call(self, like: fx.Node, target: Any, arguments: Arguments) -> fx.Node:
        """Add and return a call, its arguments by the names of the op's schema, in the modules of the node `like`."""
        schema_arguments = [each for each in target._schema.arguments if each.name in arguments]
        args = tuple(arguments[each.name] for each in schema_arguments if not each.kwarg_only)
        kwargs = {each.name: arguments[each.name] for each in schema_arguments if each.kwarg_only}
        return _of_module(self.graph.call_function(target, args, kwargs), like)

    def pick(self, node: fx.Node) -> None:
        """Rewrite getitem; after an unbind along a narrower axis it becomes a select of the new number."""
        source, number = node.args
        assert isinstance(source, fx.Node), node
        call = make_call(source, self.flow.values)
        if call.op == "unbind" and call["self"].labels is not None:
            base, dim = call["self"], call["dim"]
            small = compact(base.labels).movedim(dim, 0)
            lines = small.reshape(len(small), -1)
            keep = keep_mask(lines, self.gone).any(1).expand(base.shape[dim])
            if not bool(keep.all()):
                whole, index = self.nodes[source.all_input_nodes[0]], int(keep[:number].sum())
                self.nodes[node] = self.call(node, aten.select.int, {"self": whole, "dim": dim, "index": index})
                return
        self.copy(node)

    def part(self, node: fx.Node) -> None:
        """Rewrite moves that pick a part of an uneven tensor, for the part alone; raise Uneven if a node picks none."""
        source, *moves = path_to(node, lambda each: each is node or each in self.uneven or self.is_spread(each))
        value = self.flow.values[source]
        if not is_move(node) or not isinstance(value, LabelTensor) or value.labels is None or len(value.dims) != 1:
            raise NarrowingRefused(node, "its remaining elements form no tensor")
        (dim,) = value.dims
        # Each element carries its place along the axis.
        sizes = [-1 if each == dim else 1 for each in range(len(value.shape))]
        places = torch.arange(value.shape[dim]).view(sizes).expand(value.shape)
        numbers = evaluate_nodes(self.program, moves, {source: places})
        if not isinstance(numbers[node], Tensor):
            raise Uneven("of several tensors")
        order = axis_order(numbers[node], value.shape, dim)
        if order is not None and not bool((order.diff() == 1).all()):
            self.nodes[node] = self.selected(node, source, dim, order)
            return
        own = torch.unique(compact(numbers[node]))
        first, last = int(own[0]), int(own[-1])
        if len(own) < last - first + 1 or len(own) == value.shape[dim]:
            raise Uneven("no slice of it")
        keep = keep_mask(compact(value.labels), self.gone).reshape(-1)
        goes = torch.ones(len(keep), dtype=torch.bool)
        goes[own] = ~keep[own]
        ends = {"start": int(keep[:first].sum()), "end": int(keep[: last + 1].sum())}
        new = self.call(node, aten.slice.Tensor, {"self": self.nodes[source], "dim": dim, **ends})
        moved = remove_labels(numbers[source], goes)
        for each in moves:
            if isinstance(numbers[each], Tensor):
                expected = remove_labels(numbers[each], goes)
                target, arguments = self.alone(each, moved.shape, expected.shape)
                if target is not None:
                    named = {target._schema.arguments[0].name: new, **fx.map_arg(arguments, self.nodes.get)}
                    new = self.call(node, target, named)
                    moved = target(moved, **fx.map_arg(arguments, self.flow.values.get))
        if not torch.equal(moved, expected):
            raise NarrowingRefused(node, "its op would move the remaining elements to other places")
        self.nodes[node] = new

    def is_spread(self, node: fx.Node) -> bool:
        value = self.flow.values.get(node)
        return is_move(node) and isinstance(value, LabelTensor) and value.labels is not None and len(value.dims) > 1

    def selected(self, node: fx.Node, source: fx.Node, dim: int, order: Tensor) -> fx.Node:
        """Add and return a call that selects what is left of a source along an axis, in the dense node's order."""
        keep = keep_mask(compact(self.flow.values[source].labels), self.gone).reshape(-1)
        places = (keep.cumsum(0) - 1)[order[keep[order]]]
        name = f"order_of_{node.name}"
        where = self.program.device
        self.tensors[name] = places if where.type == "meta" else places.to(where)
        index = _of_module(self.graph.create_node("get_attr", name), node)
        return self.call(node, aten.index_select.default, {"self": self.nodes[source], "dim": dim, "index": index})

    def alone(self, node: fx.Node, before: torch.Size, after: torch.Size) -> tuple[Any, Arguments]:
        """Return the op, None if none is needed, that moves one part between shapes, and its further arguments."""
        op = operation(node)
        call = make_call(node.all_input_nodes[0] if op == "getitem" else node, self.flow.values)
        if op in SHAPED:
            return aten.reshape.default, {"shape": sizes_to_reshape(node, after)}
        if (op in CUTS or op == "getitem") and before == after:
            return None, {}
        if call.op in ("select", "unbind") and before[call["dim"]] == 1:
            return aten.select.int, {"dim": call["dim"], "index": 0}
        if op == "getitem":
            raise Uneven("split along several axes")
        return node.target, {name: each for name, each in call.arguments.items() if each is not node.args[0]}

    def mask(self, call: Call, constant: fx.Node) -> Tensor | None:
        """Return the mask of a constant's elements that are left where this call uses it; None for all."""
        shape = tuple(self.program.tensor(str(constant.target)).shape)
        uses = [each for each in self.flow.constants_of(call.node) if each.name == constant.target]
        keep = torch.ones((1,) * len(shape), dtype=torch.bool) if uses else self.met(call, shape)
        for use in uses:
            labels = place_along(self.flow.groups.of(use.labels), use.axes, len(shape))
            keep = keep & keep_mask(labels, self.gone)
        return None if bool(keep.all()) else keep

    def met(self, call: Call, shape: tuple[int, ...]) -> Tensor:
        """Return the mask of a broadcast constant's elements that meet remaining ones.

        The mask has the expanded constant's shape if an element meets remaining ones at some places only.
        """
        value = self.flow.values[call.node]
        if not isinstance(value, LabelTensor) or value.labels is None or not is_pointwise(call.node.target):
            return torch.ones((1,) * len(shape), dtype=torch.bool)
        keep = keep_mask(compact(value.labels), self.gone)
        missing = keep.dim() - len(shape)
        own = others = keep
        for dim in range(keep.dim()):
            has_axis = dim >= missing and shape[dim - missing] > 1
            own, others = (own, others.any(dim, True)) if has_axis else (own.any(dim, True), others)
        return own.reshape(own.shape[missing:]) if torch.equal(own & others, keep) else keep

    def constant(self, node: fx.Node, keep: Tensor | None) -> fx.Node:
        """Add a node for the part of a constant that a mask keeps; the first part has the constant's name."""
        name = str(node.target)
        key = name, b"" if keep is None else f"{tuple(keep.shape)}".encode() + keep.numpy().tobytes()
        if key not in self.names:
            count = sum(each[0] == name for each in self.names)
            self.names[key] = f"{name}_{count}" if count else name
            self.tensors[self.names[key]] = kept_part(self.program.tensor(name), keep)
            self.parts[self.names[key]] = name, keep
        return _of_module(self.graph.create_node("get_attr", self.names[key]), node)


def _of_module(node: fx.Node, like: fx.Node) -> fx.Node:
    """Return a node after setting its modules to those that the node `like` was called in."""
    node.meta = {key: like.meta[key] for key in ("nn_module_stack", "source_fn_stack") if key in like.meta}
    return node
