"""A program whose tokens become fewer behind some of its attentions: the same nodes by the same names, at the sizes
that are left, with merges between them.

Legend: B inputs, H heads, N tokens, D dimensions of a head, C channels, X dimensions compared.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from corp_deploy.traced.finding.attentions import Attention, Block
from corp_deploy.traced.finding.call import call_of
from corp_deploy.traced.finding.cuts import passed_by_all
from corp_deploy.traced.programs.attended import SOFTMAX, WHOLE, added_scores
from corp_deploy.traced.programs.batch import IN_FRONT, batch_of
from corp_deploy.traced.programs.folding import NUMBERS
from corp_deploy.traced.programs.program import SAME, SHAPED, Program, module_of, number_of, operation, sizes_at_one
from corp_deploy.traced.programs.sizes import size_
from ground.errors import BadInput

from .merging import Merging, tokens_after
from .token_merging import TokenMerge, key_bias, unmerged

_ARRANGED = frozenset(
    ("permute", "transpose", "t", "mT", "movedim", "moveaxis", "swapaxes", "swapdims", "getitem", "stack")
)
_REDUCED = frozenset(("mean", "sum", "amax", "amin", "softmax", "_softmax"))
"""What fewer tokens give something alike of, where they are tokens as the others were."""
_ALONG = _REDUCED | {
    "cat",
    "select",
    "slice",
    "narrow",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "log_softmax",
    "var",
}
"""What works along the axes that it names, and token by token along others."""
_ANY = "a merged token would stand at none of its places"


class _Stands(Exception):
    """At a node that reads tokens by where they stand, or all of them at once."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{operation(node)} in {module_of(node)[0] or 'the model'} {reason}")
        self.node = node


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """`program`: what runs; `stands`: by the name of a node of the program with all tokens what its users take here;
    `merge_at`, `sizes_at`, `sources_at`: of those of fewer tokens by their names the merge before them, and the nodes
    that give its sizes and sources.
    """

    program: Program
    stands: Mapping[str, fx.Node]
    merge_at: Mapping[str, TokenMerge]
    sizes_at: Mapping[str, fx.Node]
    sources_at: Mapping[str, fx.Node]

    @property
    def by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.nodes}


def fewer_tokens(
    program: Program, blocks: Sequence[Block], protected: int, merging: Merging, *, follows: bool
) -> Fewer:
    """The program with tokens merged behind these blocks' attentions; `follows`: it is told where each source token is,
    whether anything asks for that or not. Raises BadInput where something needs all tokens.
    """
    tokens_after(merging, blocks[0].tokens, protected)
    try:
        merged, reader = _Fewer(program, blocks, protected, merging, None, follows).made(), None
        if not merging.unmerged:
            return merged
    except _Stands as read:
        reason, reader = read, read.node
    unmerging = None if merging.how == "drop" else _last_stream(program, blocks, reader)
    try:
        if unmerging is None:
            raise reason
        return _Fewer(program, blocks, protected, merging, unmerging, follows).made()
    except _Stands as still:
        raise BadInput(f"token merging: {still}; leave --merge-tokens away") from None


def _last_stream(program: Program, blocks: Sequence[Block], before: fx.Node | None) -> fx.Node | None:
    """The last node [B,N,C], of all tokens of the stream behind the last block, that all else is computed through."""
    last, tokens = None, blocks[-1].tokens
    for passed in passed_by_all(program):
        if before in passed.since:
            break
        sizes = sizes_at_one(passed.node)
        is_stream = isinstance(sizes, tuple) and len(sizes) == 3 and sizes[1] == tokens
        if passed.node is blocks[-1].added or (last is not None and is_stream):
            last = passed.node
    return last


@dataclass(slots=True)
class _Fewer:
    """`units`: of nodes whose tokens are fewer, how many one of its axes of tokens counted, and how many it does now,
    or a multiple of these; `axes`: which those are; `values`: what nodes give now, on meta, at a batch of 1.
    """

    program: Program
    blocks: Sequence[Block]
    protected: int
    merging: Merging
    unmerging: fx.Node | None
    follows: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    units: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    axes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    merges: dict[str, TokenMerge] = field(default_factory=dict)
    merge_at: dict[str, TokenMerge] = field(default_factory=dict)
    sizes_at: dict[str, fx.Node] = field(default_factory=dict)
    sources_at: dict[str, fx.Node] = field(default_factory=dict)
    sizes: fx.Node | None = None
    sources: fx.Node | None = None
    added: int = 0

    def made(self) -> Fewer:
        by_sum = {block.added: number for number, block in enumerate(self.blocks)}
        by_node = {
            node: each
            for block in self.blocks
            for each in block.attentions
            for node in (each.product, each.whole, *(() if each.scores is None else each.scores.users))
        }
        for node in self.program.nodes:
            if node.op == "output" or not any(each in self.units for each in node.all_input_nodes):
                self.nodes[node] = self.graph.node_copy(node, lambda each: self.nodes[each])
            else:
                self._behind(node, by_node.get(node))
            if node in by_sum:
                self._merge(by_sum[node])
            if node is self.unmerging:
                self._unmerge(node)
        return self._as_fewer()

    def _as_fewer(self) -> Fewer:
        self.graph.set_codegen(copy(self.program.graph.graph._codegen))
        root: dict[str, Any] = dict(self.merges)
        root |= {
            str(node.target): self.program.tensor(str(node.target))
            for node in self.graph.nodes
            if node.op == "get_attr"
        }
        graph = fx.GraphModule(root, self.graph).eval()
        if not self.follows:
            graph.graph.eliminate_dead_code()
            graph.recompile()
        inputs = [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]
        size_(graph, inputs, any_batch=True)
        return Fewer(
            program=Program(graph=graph, model=self.program.model, any_batch=True, folded=self.program.folded),
            stands={node.name: new for node, new in self.nodes.items()},
            merge_at=self.merge_at,
            sizes_at=self.sizes_at,
            sources_at=self.sources_at,
        )

    def _new(self, function: Any, *args: Any, like: fx.Node) -> fx.Node:
        """One more call, named unlike any that a program has."""
        self.added += 1
        node = self.graph.create_node("call_function", function, args, {}, f"of_fewer_tokens_{self.added}")
        node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
        return node

    # Values on meta, at a batch of 1.

    def _value(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        number = number_of(node)
        if number is not None:
            return number
        types = tree_map_only(Tensor, lambda each: each.dtype, node.meta["val"])
        if isinstance(types, torch.dtype):
            return torch.empty(sizes_at_one(node), dtype=types, device="meta")
        return [torch.empty(size, dtype=of, device="meta") for size, of in zip(sizes_at_one(node), types, strict=True)]

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        given = fx.map_arg((args, kwargs), self._value)
        given = tree_map_only(torch.device, lambda _: torch.device("meta"), given)
        assert callable(node.target), node
        try:
            return node.target(*given[0], **given[1])
        except RuntimeError:
            raise _Stands(node, f"takes something with a place for every token, as positions are: {_ANY}") from None

    # Nodes behind a merge.

    def _behind(self, node: fx.Node, attention: Attention | None) -> None:
        unit = self._unit(node)
        args, kwargs = self._arguments(node, unit)
        is_left = self._refuse_reading(node, attention)
        value = self._run(node, args, kwargs)
        new = self.nodes[node] = self.graph.node_copy(node, lambda each: self.nodes[each])
        new.args, new.kwargs = fx.map_arg((args, kwargs), lambda each: self.nodes[each])
        if attention is not None and self.sizes is not None:
            self._count_sizes(node, new, attention)
        self.values[node] = value
        axes = frozenset(_changed(sizes_at_one(node), tuple(value.shape))) if isinstance(value, Tensor) else None
        if axes is None or axes:
            now = unit if is_left else (unit[0] - self.protected, unit[1] - self.protected)
            self.units[node], self.axes[node] = now, axes or frozenset()
            self._tell(node)

    def _tell(self, node: fx.Node) -> None:
        """What is known of the tokens of a node behind a merge."""
        self.merge_at[node.name] = list(self.merges.values())[-1]
        for known, of_tokens in ((self.sizes_at, self.sizes), (self.sources_at, self.sources)):
            if of_tokens is not None:
                known[node.name] = of_tokens

    def _unit(self, node: fx.Node) -> tuple[int, int]:
        units = {self.units[each] for each in node.all_input_nodes if each in self.units}
        if len(units) > 1:
            raise _Stands(node, "takes tokens beside some of them")
        return units.pop()

    def _arguments(self, node: fx.Node, unit: tuple[int, int]) -> tuple[Any, Any]:
        """With the sizes that are now."""
        op = operation(node)
        if op in SHAPED:
            return self._reshaped(node, unit)
        if op in ("expand", "broadcast_to"):
            before = self._value(node.args[0])  # type: ignore[arg-type]
            missing = len(node.args[1]) - before.dim()  # type: ignore[arg-type]
            asked: Any = node.args[1]
            sizes = [-1 if at >= missing and before.shape[at - missing] != 1 else each for at, each in enumerate(asked)]
            return (node.args[0], sizes), {}
        if op == WHOLE and self._masks_nothing(node):
            others = {name: each for name, each in node.kwargs.items() if name != "attn_mask"}
            return (*node.args[:3], None, *node.args[4:]), others
        return node.args, node.kwargs

    def _masks_nothing(self, node: fx.Node) -> bool:
        """Whether what is added to scores is nothing, for every pair and every image, and whatever weights are."""
        front = [call_of(node, {}).arguments["attn_mask"]]
        if front[0] is None:
            return False
        for each in front:
            front += [source for source in each.all_input_nodes if source not in front and number_of(source) is None]
        if not all(str(each.target).startswith(NUMBERS) for each in front if each.op == "get_attr"):
            return False
        added = added_scores(self.program, node)
        return added is not None and not added.is_meta and not bool(added.any())

    def _reshaped(self, node: fx.Node, unit: tuple[int, int]) -> tuple[Any, Any]:
        source = node.args[0]
        assert isinstance(source, fx.Node), node
        old, new = sizes_at_one(source), tuple(self._value(source).shape)
        if operation(node) in ("squeeze", "unsqueeze", "flatten", "ravel"):
            return node.args, node.kwargs
        wanted = _resized(old, new, sizes_at_one(node), unit)
        if wanted is None:
            raise _Stands(node, f"lays tokens out by where they stand: {_ANY}")
        sizes = _of_any_batch(node, wanted)
        if sizes is None:
            raise _Stands(node, "puts tokens and images on several axes at once")
        if operation(node) == "unflatten":
            dim = call_of(node, {}).arguments["dim"] % len(old)
            sizes = sizes[dim : dim + 1 + len(wanted) - len(old)]
            return (source, dim, sizes), {}
        return (source, sizes), {}

    def _refuse_reading(self, node: fx.Node, attention: Attention | None) -> bool:
        """Refuse what reads tokens by where they stand or all at once; whether the protected ones are still there."""
        op = operation(node)
        entering = [each for each in node.all_input_nodes if each in self.units]
        axes = frozenset[int]().union(*(self.axes[each] for each in entering))
        if op in _ARRANGED | SHAPED | SAME | {"expand", "broadcast_to"} or _is_pointwise(node):
            return True
        if attention is not None and self._is_of_tokens(node, attention):
            return True
        if op == "linear" and len(sizes_at_one(entering[0])) - 1 not in axes:
            return True
        if op in ("layer_norm", "rms_norm"):
            last = len(call_of(node, {}).arguments["normalized_shape"])
            if all(dim < len(sizes_at_one(entering[0])) - last for dim in axes):
                return True
        if op in _ALONG:
            return self._refuse_along(node, axes, len(sizes_at_one(entering[0])))
        if op == WHOLE and self.merging.how == "drop" and call_of(node, {}).arguments["attn_mask"] is None:
            return True
        raise _Stands(node, "reads all tokens at once: those that were merged would count as one")

    def _refuse_along(self, node: fx.Node, axes: frozenset[int], rank: int) -> bool:
        arguments, op = call_of(node, {}).arguments, operation(node)
        dims = arguments.get("dim")
        dims = range(rank) if dims is None else dims if isinstance(dims, list | tuple) else (dims,)
        if axes.isdisjoint(each % rank for each in dims):
            return True
        if op == "select" and 0 <= arguments["index"] < self.protected:
            return True
        if op == "slice" and arguments["step"] == 1:
            start, end = arguments["start"] or 0, arguments["end"]
            if start >= 0 and end is not None and 0 <= end <= self.protected:
                return True
        if self.merging.how == "drop":
            if op == "slice" and arguments["start"] == self.protected and (arguments["end"] or 1 << 62) > 1 << 31:
                return False
            if op in _REDUCED:
                return True
        raise _Stands(node, "reads all tokens at once, or some by where they stand")

    # Attentions.

    def _is_of_tokens(self, node: fx.Node, attention: Attention) -> bool:
        if operation(node) in SOFTMAX:
            return True
        sides = [self.axes.get(each) for each in node.all_input_nodes[: 3 if operation(node) == WHOLE else 2]]
        ranks = [len(sizes_at_one(each)) for each in node.all_input_nodes[: len(sides)]]
        last = ranks[0] - 1
        if operation(node) == WHOLE:
            arguments = call_of(node, {}).arguments
            masks = arguments["attn_mask"] is not None and not self._masks_nothing(node)
            if masks or arguments["is_causal"]:
                raise _Stands(node, f"adds to scores by where tokens stand or masks them: {_ANY}")
            return sides == [frozenset({last - 1})] * 3
        dims = ((last - 1,), (last,)) if node is attention.product else ((last - 1, last), (last - 1,))
        return sides == list(map(frozenset, dims))

    def _count_sizes(self, node: fx.Node, new: fx.Node, attention: Attention) -> None:
        """A key counts as often as tokens stand in it."""
        is_softmax = operation(node) in SOFTMAX
        if not is_softmax and operation(node) != WHOLE:
            return
        self._refuse_layout(attention)
        scored = new.all_input_nodes[0]
        with self.graph.inserting_before(new):
            bias = self._new(_bias_like, self.sizes, scored, like=node)
            if is_softmax:
                new.args = (self._new(torch.ops.aten.add.Tensor, scored, bias, like=node), *new.args[1:])
        if not is_softmax:
            new.args = (*new.args[:3], bias, *new.args[4:])

    @staticmethod
    def _refuse_layout(attention: Attention) -> None:
        queries = attention.queries
        if len(sizes_at_one(queries)) != 4 or batch_of(queries) != IN_FRONT:
            raise _Stands(attention.product, "has heads and images on one axis, so that sizes can't be added to scores")

    # Merges.

    def _merge(self, number: int) -> None:
        block, count = self.blocks[number], self.merging.schedule[number]
        if not count:
            return
        tokens = self.units.get(block.added, (block.tokens, block.tokens))
        merge = TokenMerge(
            count=count,
            protected=self.protected,
            how=self.merging.how,
            metric=self.merging.metric,
            follows=self.follows or self.unmerging is not None,
        )
        name = _free(f"{block.path}.merge" if block.path else "merge", self.program, self.merges)
        stream = self.nodes[block.added]
        compared = self._compared(block, stream)
        call = self.graph.create_node(
            "call_module", name, (stream, self.sizes, self.sources, compared), {}, f"of_merge_{number}"
        )
        call.meta["nn_module_stack"] = block.added.meta.get("nn_module_stack", {})
        parts = [self._new(operator.getitem, call, at, like=block.added) for at in range(3)]
        self.merges[name] = merge
        self.nodes[block.added], sizes, sources = parts
        self.sizes = sizes if self.merging.how == "merge" else None
        self.sources = sources if merge.follows else None
        left = tokens[1] - count
        self.values[block.added] = self._value(block.added).new_empty((1, left, sizes_at_one(block.added)[2]))
        self.units[block.added], self.axes[block.added] = (block.tokens, left), frozenset({1})
        self._tell(block.added)

    def _compared(self, block: Block, stream: fx.Node) -> fx.Node:
        if not self.merging.compares_attention:
            return stream
        if len(block.attentions) > 1 and self.merging.how == "drop":
            raise _Stands(block.added, "adds several attentions, which may keep other tokens each; merge instead")
        for each in block.attentions:
            self._refuse_layout(each)
        if self.merging.how == "merge":
            keys = [
                self._new(_keys, self.nodes[each.keys], each.scores is not None, like=block.added)
                for each in block.attentions
            ]
            return keys[0] if len(keys) == 1 else self._new(torch.cat, keys, -1, like=block.added)
        if not self.protected:
            raise BadInput("merging: drop keeps what the class token attends to, and the model has none; merge instead")
        return self._attention(block.attentions[0], block.added)

    def _attention(self, attention: Attention, like: fx.Node) -> fx.Node:
        if attention.scores is not None:
            (softmax,) = attention.scores.users
            return self._new(_of_first, self.nodes[softmax], like=like)
        arguments = call_of(attention.product, {}).arguments
        scale = arguments["scale"] or sizes_at_one(attention.queries)[-1] ** -0.5
        return self._new(_attended, self.nodes[attention.queries], self.nodes[attention.keys], float(scale), like=like)

    def _unmerge(self, node: fx.Node) -> None:
        if node in self.units:
            self.nodes[node] = self._new(unmerged, self.nodes[node], self.sources, like=node)
            every: tuple[dict[Any, Any], ...] = (self.units, self.axes, self.values)
            for known in every:
                del known[node]
            for told in (self.merge_at, self.sizes_at, self.sources_at):
                told.pop(node.name)
            self.sizes = self.sources = None


def _bias_like(sizes_BN: Tensor, scored: Tensor) -> Tensor:
    """What is added to scores that are of the type of something."""
    return key_bias(sizes_BN, scored.dtype)


def _keys(keys: Tensor, is_turned: bool) -> Tensor:
    """Of all heads side by side [B,N,X], of [B,H,N,D] or [B,H,D,N]."""
    keys_BNHD = keys.permute(0, 3, 1, 2) if is_turned else keys.transpose(1, 2)
    return keys_BNHD.flatten(2)


def _of_first(shares_BHNN: Tensor) -> Tensor:
    """How much the first token attends to each, the mean over heads [B,N]."""
    return shares_BHNN[:, :, 0].float().mean(dim=1)


def _attended(q_BHND: Tensor, k_BHND: Tensor, scale: float) -> Tensor:
    scores_BHN = ((q_BHND[:, :, :1] * scale) @ k_BHND.transpose(-2, -1)).squeeze(2)
    return scores_BHN.softmax(-1, dtype=torch.float32).mean(dim=1)


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _changed(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[int]:
    assert len(old) == len(new), (old, new)
    return (dim for dim, (one, other) in enumerate(zip(old, new, strict=True)) if one != other)


def _free(name: str, program: Program, taken: Mapping[str, nn.Module]) -> str:
    """A name that no other merge has, nor a module of the program."""
    used = {str(node.target).rpartition(".")[0] for node in program.nodes if node.op == "get_attr"} | set(taken)
    while any(each == name or each.startswith(f"{name}.") for each in used):
        name += "_"
    return name


def _resized(
    old: tuple[int, ...], new: tuple[int, ...], given: tuple[int, ...], unit: tuple[int, int]
) -> list[int] | None:
    """What a reshaping from sizes, which are others now, gives now; None where it takes tokens apart."""
    wanted = list(given)
    for entering, leaving in _matched(old, given):
        before, now = (math.prod(sizes[at] for at in entering) for sizes in (old, new))
        if before == now:
            continue
        held = [at for at in leaving if given[at] % unit[0] == 0]
        if len(held) != 1 or before * unit[1] != now * unit[0]:
            return None
        wanted[held[0]] = given[held[0]] // unit[0] * unit[1]
    return wanted


def _matched(old: tuple[int, ...], given: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Axes of two shapes of the same elements, as few at a time as have the same product."""
    one, other = 0, 0
    while one < len(old) or other < len(given):
        entering, leaving = list(range(one, min(one + 1, len(old)))), list(range(other, min(other + 1, len(given))))
        while (left := math.prod(old[at] for at in entering)) != (right := math.prod(given[at] for at in leaving)):
            if left < right:
                entering.append(one + len(entering))
            else:
                leaving.append(other + len(leaving))
        one, other = one + len(entering), other + len(leaving)
        yield entering, leaving


def _of_any_batch(node: fx.Node, sizes: Sequence[int]) -> list[int] | None:
    """To be reshaped to: these at a batch of 1, at any other what is left."""
    counted = [at for at, size in enumerate(node.meta["sizes"]) if not isinstance(size, int)]
    return None if len(counted) > 1 else [-1 if at in counted else size for at, size in enumerate(sizes)]
