"""Positions of merged tokens: means of tables of positions over the source tokens, in a graph that merges tokens.

A merged token gets the mean of its source tokens' rows of a table that is added to or multiplied with tokens, and the
mean over rows and columns of a bias of pairs. Scores are linear in the sines and cosines that turn a query or a key, so
that their means give the mean of the source tokens' scores. But a softmax follows: n keys weigh more than n keys of
their mean score. Therefore mean sines and cosines, which are shorter than one, are scaled up to the root of their
length, which errs less than the mean, and in most cases than a whole rotation (benchmarks/quality/positions.py).

Legend: B inputs, M source tokens, N tokens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.program import Program, sizes_at_one


class UntrackedSources(Exception):
    """The error of a table of positions in a graph whose merges don't track source tokens."""


def source_shares(sources_BM: Tensor, count: int, skipped: int) -> Tensor:
    """Return the share [B,N,M] of each source token in each of `count` tokens, without the first `skipped` of both."""
    is_in_BNM = sources_BM.unsqueeze(1) == torch.arange(count, device=sources_BM.device).unsqueeze(1)
    own_BNM = is_in_BNM[:, skipped:, skipped:].float()
    return own_BNM / own_BNM.sum(dim=-1, keepdim=True)


def mean_positions(table: Tensor, shares_BNM: Tensor, dim: int) -> Tensor:
    """Average a table [B or 1,...] over the source tokens, which its axis `dim` counts, not its first."""
    shares = shares_BNM.to(table.dtype)
    for _ in range(table.dim() - 3):
        shares = shares.unsqueeze(1)
    return (shares @ table.movedim(dim, -2)).movedim(-2, dim)


def scaled_turn(mean: Tensor, other: Tensor) -> Tensor:
    """Scale mean sines, beside the mean cosines, or the other way round, to the root of the length of both."""
    square = mean.float().square() + other.float().square()
    return mean * square.clamp_min(1e-6).pow(-0.25).to(mean.dtype)


def even_sources(x: Tensor, tokens: int, count: int) -> Tensor:
    """Return the sources [B,`tokens`] of an even merge into `count` tokens, to time a stream of fewer tokens alone."""
    return (torch.arange(tokens, device=x.device) * count // tokens).expand(x.shape[0], -1)


def count_macs_of_means(program: Program) -> int:
    """Count the multiply-adds of a program's means of positions, for one input."""
    means = (node for node in program.nodes if node.target is mean_positions)
    return sum(math.prod(sizes_at_one(each)) * sizes_at_one(each.all_input_nodes[1])[2] for each in means)


@dataclass(slots=True, kw_only=True)
class PositionMeans:
    """Nodes of a graph that average a program's tables of positions over `sources`, each table once for all its users.

    `sources` is the node of the current stream's sources, None if they are not tracked.
    """

    program: Program
    graph: fx.Graph
    sources: fx.Node | None = None
    made: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)
    tables: list[fx.Node] = field(default_factory=list)

    def average(
        self, table: fx.Node, copied: fx.Node, dims: Iterable[int], rank: int, count: int, skipped: int, like: fx.Node
    ) -> fx.Node:
        """Return a node of a table averaged along axes, which are those of the table with `rank` axes.

        `table`: its node in the program, `copied` in the graph. `count`: the number of tokens of the stream, of which
        the table lacks the first `skipped`. `like`: a node in the module that reads the table.
        """
        if self.sources is None:
            raise UntrackedSources(table.name)
        shares = self._once(like, source_shares, self.sources, count, skipped)
        first = self._equal_table(table, copied)
        missing = rank - len(sizes_at_one(table))
        shape = (1,) * missing + tuple(sizes_at_one(table))
        mean = self._once(like, torch.ops.aten.reshape.default, first, shape) if missing else first
        for dim in dims:
            mean = self._once(like, mean_positions, mean, shares, dim)
        return mean

    def turn(self, mean: fx.Node, other: fx.Node, like: fx.Node) -> fx.Node:
        """Return a node of mean sines or cosines, beside the other, that are scaled; see scaled_turn."""
        return self._once(like, scaled_turn, mean, other)

    def _once(self, like: fx.Node, function: Any, *args: Any) -> fx.Node:
        key = function, *args
        if key not in self.made:
            node = self.graph.create_node("call_function", function, args, {}, f"of_positions_{len(self.made) + 1}")
            node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
            self.made[key] = node
        return self.made[key]

    def _equal_table(self, table: fx.Node, copied: fx.Node) -> fx.Node:
        """Return the copy of the first constant that equals this table: each block has its own of the same rotation."""
        if table.op != "get_attr":
            return copied
        own = self.program.tensor(str(table.target))
        for other in self.tables:
            known = self.program.tensor(str(other.target))
            if known is own or (not own.is_meta and known.dtype == own.dtype and torch.equal(known, own)):
                return other
        self.tables.append(copied)
        return copied
