"""Copies of a program's nodes, those after a token merge at the remaining token counts.

Legend: B inputs, N tokens.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from corp_deploy.traced.finding.attentions import Attention
from corp_deploy.traced.finding.cuts import input_free_nodes
from corp_deploy.traced.programs.attention_masks import SDPA, added_scores
from corp_deploy.traced.programs.folding import NUMBERS
from corp_deploy.traced.programs.program import (
    IN_FRONT,
    SHAPED,
    Program,
    batch_axis_of,
    constant_names,
    find_reachable,
    named_arguments,
    number_at_one,
    operation,
    sizes_at_one,
    sizes_of_any_batch,
)
from corp_deploy.traced.programs.sizes import call_on_meta, changes_in_place

from .position_means import PositionMeans
from .token_units import MERGED, PositionDependent, TokenUnits

_LINEAR = frozenset(("add", "add_", "sub", "sub_", "mul", "mul_"))
"""Ops of tokens and a table of positions; with a mean of the table's rows they give a mean of their results."""


@dataclass(slots=True, kw_only=True)
class MergedNodes(TokenUnits):
    """A graph under construction, with the copies of a program's `nodes`, some of them for fewer tokens.

    `values`: meta results of copies at a batch of 1. `means`: tables of positions for fewer tokens. `free`: the
    program's nodes that need no input.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    means: PositionMeans = field(init=False)
    free: set[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        TokenUnits.__post_init__(self)
        self.means = PositionMeans(program=self.program, graph=self.graph)
        self.free = input_free_nodes(self.program)

    def copy_(self, node: fx.Node, **instead: fx.Node) -> None:
        """Copy a node as it is, a constant once; `instead`: other inputs in place of those of these names."""
        if node.op != "get_attr" or node not in self.nodes:
            self.nodes[node] = self.graph.node_copy(node, lambda each: instead.get(each.name, self.nodes.get(each)))

    def begin_(self, node: fx.Node, tokens: int) -> None:
        """Set the number of tokens that a stream [B,N,C] has from here on."""
        _, all_tokens, channels = sizes_at_one(node)
        self.values[node] = self.value(node).new_empty((1, tokens, channels))
        self.stream = self.units[node] = all_tokens, tokens
        self.axes[node] = frozenset({1})

    def behind_(self, node: fx.Node, attention: Attention | None) -> None:
        """Copy a node that takes fewer tokens; raise PositionDependent if it needs all."""
        units = {self.units[each] for each in node.all_input_nodes if each in self.units}
        if len(units) > 1:
            raise PositionDependent(node, "combines tensors of different numbers of tokens")
        unit = units.pop()
        behind = self.unit_behind(node, unit, attention)
        args, kwargs = self._arguments(node, unit)
        value = self._run(node, args, kwargs)
        self.copy_(node)
        new = self.nodes[node]
        new.args, new.kwargs = fx.map_arg((args, kwargs), lambda each: self.nodes.get(each, each))
        self.values[node] = value
        is_one = isinstance(value, Tensor)
        shapes = zip(sizes_at_one(node), value.shape, strict=True) if is_one else ()
        axes = frozenset(dim for dim, (before, now) in enumerate(shapes) if before != now)
        if axes or not is_one:
            self.units[node], self.axes[node] = behind, axes

    def value(self, node: fx.Node) -> Any:
        """Return a node's result on meta at a batch of 1."""
        if node in self.values:
            return self.values[node]
        number = number_at_one(node)
        if number is not None:
            return number
        types = tree_map_only(Tensor, lambda each: each.dtype, node.meta["val"])
        if isinstance(types, torch.dtype):
            return torch.empty(sizes_at_one(node), dtype=types, device="meta")
        return [torch.empty(size, dtype=of, device="meta") for size, of in zip(sizes_at_one(node), types, strict=True)]

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        arguments = fx.map_arg((args, kwargs), self.value)
        assert callable(node.target), node
        if changes_in_place(node):  # other users of these values see them unchanged
            arguments = tree_map_only(Tensor, Tensor.clone, arguments)
        try:
            return call_on_meta(node.target, *arguments)
        except RuntimeError:
            raise PositionDependent(
                node, f"takes a tensor with an entry for every token, such as positions: {MERGED}"
            ) from None

    def _arguments(self, node: fx.Node, unit: tuple[int, int]) -> tuple[Any, Any]:
        """Return a node's arguments with the sizes of fewer tokens."""
        op = operation(node)
        if op in SHAPED:
            return self._reshaped(node, unit)
        if op in ("expand", "broadcast_to"):
            before = self.value(node.args[0])  # type: ignore[arg-type]
            missing = len(node.args[1]) - before.dim()  # type: ignore[arg-type]
            requested: Any = node.args[1]
            sizes = [
                -1 if at >= missing and before.shape[at - missing] != 1 else each for at, each in enumerate(requested)
            ]
            return (node.args[0], sizes), {}
        if op == SDPA:
            others = {name: each for name, each in node.kwargs.items() if name != "attn_mask"}
            return (*node.args[:3], self._mean_bias(node, unit), *node.args[4:]), others
        if op in ("split", "split_with_sizes") and self.splits_protected(node, unit):
            return (node.args[0], [self.protected, unit[1] - self.protected], named_arguments(node)["dim"]), {}
        means = self._mean_tables(node, unit) if op in _LINEAR else {}
        return fx.map_arg((node.args, node.kwargs), lambda each: means.get(each, each))

    def _mean_tables(self, node: fx.Node, unit: tuple[int, int]) -> dict[fx.Node, fx.Node]:
        """Return, by table, the nodes of the means of tables of positions that a node combines with tokens."""
        rank, means = len(sizes_at_one(node)), dict[fx.Node, fx.Node]()
        moving = [each for each in node.all_input_nodes if each in self.units]
        axes = {dim + rank - len(sizes_at_one(each)) for each in moving for dim in self.axes[each]}
        for table in node.all_input_nodes:
            mean = self._mean(node, table, axes, rank, unit) if table in self.free else table
            if mean is not table:
                means[table] = mean
                other = self._other_of_rotation(node, table)
                if other is not None:
                    means[table] = self.means.turn(mean, self._mean(node, other, axes, rank, unit), node)
                    self.values[means[table]] = self.values[mean]
        return means

    def _other_of_rotation(self, node: fx.Node, table: fx.Node) -> fx.Node | None:
        """Return the sines beside cosines, or the cosines beside sines, if the node's sum with another turns tokens."""
        sums = [user for user in node.users if operation(user) in ("add", "add_")]
        beside = [each for user in sums for each in user.all_input_nodes if each is not node]
        products = [each for each in (node, *beside) if operation(each) in ("mul", "mul_")]
        if node not in products or table.op != "get_attr":
            return None
        own = self.program.tensor(str(table.target))
        for other in (each for product in products[1:] for each in product.all_input_nodes if each.op == "get_attr"):
            both = own, self.program.tensor(str(other.target))
            if both[0].shape == both[1].shape and _are_sines_and_cosines(*both):
                self.copy_(other)
                return other
        return None

    def _mean_bias(self, node: fx.Node, unit: tuple[int, int]) -> fx.Node | None:
        """Return the node of the mean of the bias that a fused attention adds to its scores; None if it adds none."""
        bias, rank = named_arguments(node)["attn_mask"], len(sizes_at_one(node))
        if bias is None or bias in self.units or _masks_nothing(self.program, node):
            return bias if bias in self.units else None
        return self._mean(node, bias, {rank - 2, rank - 1}, rank, unit)

    def _mean(self, node: fx.Node, table: fx.Node, axes: set[int], rank: int, unit: tuple[int, int]) -> fx.Node:
        """Return the node of a table's mean along those of `axes` that count tokens, the table itself without one."""
        sizes: tuple[int, ...] = sizes_at_one(table) or ()
        missing = rank - len(sizes)
        dims = sorted(dim for dim in axes if dim >= missing and sizes[dim - missing] == unit[0] > 1)
        if not dims:
            return table
        skipped = self.stream[0] - unit[0]
        is_current = unit[1] + skipped == self.stream[1]
        if not is_current or dims[0] == 0 or batch_axis_of(node) != IN_FRONT or (not missing and sizes[0] != 1):
            raise PositionDependent(node, f"combines tokens with positions that have no mean for each image: {MERGED}")
        shape = [1] * missing + [unit[1] if dim + missing in dims else size for dim, size in enumerate(sizes)]
        mean = self.means.average(table, self.nodes[table], dims, rank, self.stream[1], skipped, node)
        self.values[mean] = self.value(table).new_empty(shape)
        return mean

    def _reshaped(self, node: fx.Node, unit: tuple[int, int]) -> tuple[Any, Any]:
        source = node.args[0]
        assert isinstance(source, fx.Node), node
        old, new = sizes_at_one(source), tuple(self.value(source).shape)
        if operation(node) in ("squeeze", "unsqueeze", "flatten", "ravel"):
            return node.args, node.kwargs
        new_shape = _resized(old, new, sizes_at_one(node), unit)
        if new_shape is None:
            raise PositionDependent(node, f"arranges tokens by their positions: {MERGED}")
        sizes = sizes_of_any_batch(node, new_shape)
        if sizes is None:
            raise PositionDependent(node, "gives a tensor of which several axes depend on the batch")
        if operation(node) == "unflatten":
            dim = named_arguments(node)["dim"] % len(old)
            sizes = sizes[dim : dim + 1 + len(new_shape) - len(old)]
            return (source, dim, sizes), {}
        return (source, sizes), {}


def _are_sines_and_cosines(one: Tensor, other: Tensor) -> bool:
    length = one.float().square() + other.float().square()
    return length.is_meta or torch.allclose(length, torch.ones_like(length), atol=1e-2)


def _masks_nothing(program: Program, node: fx.Node) -> bool:
    """Check that an attention's mask is a constant of zeros, which no parameter changes."""
    mask = named_arguments(node)["attn_mask"]
    if mask is None:
        return False
    sources = find_reachable(
        [mask], lambda each: [source for source in each.all_input_nodes if number_at_one(source) is None]
    )
    if not all(name.startswith(NUMBERS) for name in constant_names(sources)):
        return False
    added = added_scores(program, node)
    return added is not None and not added.is_meta and not bool(added.any())


def _resized(
    old: tuple[int, ...], new: tuple[int, ...], shape: tuple[int, ...], unit: tuple[int, int]
) -> list[int] | None:
    """Return the shape that a reshape from `old` to `shape` gives for fewer tokens, `new`; None if it splits tokens."""
    result, ways = list(shape), [list(accumulate(sizes, mul, initial=1)) for sizes in (old, shape)]
    # Between two common products, the axes of both shapes hold the same elements.
    for start, end in pairwise(sorted(set(ways[0]) & set(ways[1]))):
        entering, leaving = (
            [at for at, (low, high) in enumerate(pairwise(way)) if start <= low < high <= end] for way in ways
        )
        before, now = (math.prod(sizes[at] for at in entering) for sizes in (old, new))
        if before == now:
            continue
        multiples = [at for at in leaving if shape[at] % unit[0] == 0]
        if len(multiples) != 1 or before * unit[1] != now * unit[0]:
            return None
        result[multiples[0]] = shape[multiples[0]] // unit[0] * unit[1]
    return result
