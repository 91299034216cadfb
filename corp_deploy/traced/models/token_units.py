"""Token counts of nodes behind a token merge, and the ops that may stand there."""

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from corp_deploy.traced.finding.attentions import Attention, find_attentions
from corp_deploy.traced.finding.pointwise import is_pointwise
from corp_deploy.traced.programs.attention_masks import SDPA, SOFTMAX, added_scores, visible_keys
from corp_deploy.traced.programs.program import (
    SAME,
    SHAPED,
    Program,
    find_reachable,
    module_of,
    named_arguments,
    operation,
    sizes_at_one,
)

_ARRANGED, _REDUCED, _ALONG = (
    frozenset(ops.split())
    for ops in (
        "permute transpose t mT movedim moveaxis swapaxes swapdims getitem stack",
        # reductions over tokens, which dropped tokens leave meaningful
        "mean sum amax amin softmax _softmax",
        # ops along the axes that they name, which work token by token along others
        "cat select slice narrow split split_with_sizes chunk unbind log_softmax var",
    )
)
MERGED = "a merged token has no single position"


class PositionDependent(Exception):
    """The error of a node that depends on token positions, or on all tokens at once."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{operation(node)} in {module_of(node)[0] or 'the model'} {reason}")
        self.node = node


@dataclass(slots=True, kw_only=True)
class TokenUnits:
    """The token counts of a program's nodes, some of which take fewer tokens.

    `protected`: the number of first tokens that stay in place. `as_before`: the other tokens are unchanged, as tokens
    are dropped, not merged. For nodes of fewer tokens: `axes` count tokens, and `units` are the token counts in the
    program and now, of which the sizes of `axes` are multiples. `stream`: the unit of a whole stream, with protected
    tokens. `attended`: the nodes that attentions are computed from.
    """

    program: Program
    protected: int
    as_before: bool
    units: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    axes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    stream: tuple[int, int] = (0, 0)
    attended: dict[fx.Node, None] = field(init=False)

    def __post_init__(self) -> None:
        self.attended = find_reachable(each.product for each in find_attentions(self.program))

    def is_behind(self, node: fx.Node) -> bool:
        """Check whether a node takes an input of fewer tokens."""
        return any(each in self.units for each in node.all_input_nodes)

    def unit_behind(self, node: fx.Node, unit: tuple[int, int], attention: Attention | None) -> tuple[int, int]:
        """Return the unit of a node's result; raise PositionDependent if the node needs positions or all tokens."""
        op = operation(node)
        entering = [each for each in node.all_input_nodes if each in self.units]
        axes, rank = frozenset[int]().union(*(self.axes[each] for each in entering)), len(sizes_at_one(entering[0]))
        if op in _ARRANGED | SHAPED | SAME | {"expand", "broadcast_to"} or is_pointwise(node.target):
            return unit
        if attention is not None and self._is_of_tokens(node, attention):
            return unit
        if op == "linear" and rank - 1 not in axes:
            return unit
        if op in ("layer_norm", "rms_norm"):
            last = len(named_arguments(node)["normalized_shape"])
            if all(dim < rank - last for dim in axes):
                return unit
        if op in _ALONG | _REDUCED:
            return self._unit_behind_axes(node, unit, axes, rank)
        if op == SDPA and self.as_before and named_arguments(node)["attn_mask"] is None:
            return unit
        raise PositionDependent(node, "reads all tokens at once: those that were merged would count as one")

    def _unit_behind_axes(
        self, node: fx.Node, unit: tuple[int, int], axes: frozenset[int], rank: int
    ) -> tuple[int, int]:
        arguments, op = named_arguments(node), operation(node)
        dims = arguments.get("dim")
        dims = range(rank) if dims is None else dims if isinstance(dims, list | tuple) else (dims,)
        others = self.stream[0] - self.protected, self.stream[1] - self.protected
        if axes.isdisjoint(each % rank for each in dims):
            return unit
        if unit == self.stream:
            if self._reads_protected(op, arguments):
                return unit
            is_apart = self._slices_protected(op, arguments) or self.splits_protected(node, unit)
            if is_apart and (self.as_before or node in self.attended):
                return others
        if op == "cat" and unit == others and self._joins_protected(arguments["tensors"], dims[0] % rank):
            return self.stream
        if self.as_before and op in _REDUCED:
            return unit
        raise PositionDependent(node, "reads all tokens at once, or some by their positions")

    def _slices_protected(self, op: str, arguments: Any) -> bool:
        """Check for a slice without the protected tokens."""
        is_slice = op == "slice" and arguments["step"] == 1 and arguments["start"] == self.protected
        return is_slice and (arguments["end"] is None or arguments["end"] >= self.stream[0])

    def splits_protected(self, node: fx.Node, unit: tuple[int, int]) -> bool:
        """Check for a split into the protected and all other tokens."""
        if operation(node) not in ("split", "split_with_sizes") or unit != self.stream:
            return False
        arguments = named_arguments(node)
        sizes = arguments.get("split_sizes", arguments.get("split_size"))
        dim = arguments["dim"] % len(sizes_at_one(node.all_input_nodes[0]))
        is_of_tokens = dim in self.axes[node.all_input_nodes[0]]
        return is_of_tokens and sizes == [self.protected, unit[0] - self.protected]

    def _joins_protected(self, tensors: list[fx.Node], dim: int) -> bool:
        """Check for tensors of the protected tokens, in front, and one of all others."""
        *first, last = tensors
        is_behind = last in self.units and not any(each in self.units for each in first)
        return is_behind and sum(sizes_at_one(each)[dim] for each in first) == self.protected

    def _reads_protected(self, op: str, arguments: Any) -> bool:
        if op == "select":
            return bool(0 <= arguments["index"] < self.protected)
        if op != "slice" or arguments["step"] != 1:
            return False
        start, end = arguments["start"] or 0, arguments["end"]
        return start >= 0 and end is not None and 0 <= end <= self.protected

    def _is_of_tokens(self, node: fx.Node, attention: Attention) -> bool:
        if operation(node) in SOFTMAX:
            self._refuse_mask(node, attention.product)
            return True
        sides = [self.axes.get(each) for each in node.all_input_nodes[: 3 if operation(node) == SDPA else 2]]
        last = len(sizes_at_one(node.all_input_nodes[0])) - 1
        if operation(node) == SDPA:
            arguments = named_arguments(node)
            if arguments["is_causal"] or arguments["attn_mask"] in self.units:
                raise PositionDependent(node, f"adds a mask by token positions to scores: {MERGED}")
            self._refuse_mask(node, node)
            return sides == [frozenset({last - 1})] * 3
        dims = ((last - 1,), (last,)) if node is attention.product else ((last - 1, last), (last - 1,))
        return sides == list(map(frozenset, dims))

    def _refuse_mask(self, node: fx.Node, product: fx.Node) -> None:
        """Raise PositionDependent if an attention hides keys from some queries, or adds what depends on the image."""
        added = added_scores(self.program, product)
        is_of_image = operation(product) == SDPA and added is None and named_arguments(product)["attn_mask"] is not None
        if is_of_image or (added is not None and not added.is_meta and not bool(visible_keys(added).all())):
            raise PositionDependent(node, f"adds a mask by token positions to scores: {MERGED}")
