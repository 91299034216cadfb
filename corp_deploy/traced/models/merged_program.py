"""A traced program with token merging: the same nodes by the same names at the token counts left, with merges behind
some of its attentions.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from corp_deploy.traced.programs.program import Program, sizes_at_one

from .token_merging import TokenMerge, unmerge_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CutState:
    """`raw`: what comes to a cut, `node`: what goes on from there, of all tokens unless it `is_merged`; its `sizes` and
    `sources` are told then. Between the two tokens are merged by `merge`, which compares by `compared`, None for the
    stream itself, or unmerged.
    """

    raw: fx.Node
    node: fx.Node
    is_merged: bool = False
    sizes: fx.Node | None = None
    sources: fx.Node | None = None
    merge: TokenMerge | None = None
    name: str = ""
    compared: fx.Node | None = None

    @property
    def token_state(self) -> tuple[fx.Node, ...]:
        """Beside the stream."""
        return tuple(each for each in (self.sizes, self.sources) if each is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedProgram:
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

    def crossing(self, node: fx.Node) -> CutState:
        """What stands where one of the other program's nodes does."""
        stands, name = self.stands[node.name], node.name
        state = CutState(
            raw=stands,
            node=stands,
            is_merged=name in self.merge_at,
            sizes=self.sizes_at.get(name),
            sources=self.sources_at.get(name),
        )
        call = stands.args[0] if stands.target in (operator.getitem, unmerge_tokens) else stands
        assert isinstance(call, fx.Node), stands
        if call.op == "call_module":
            raw, _, _, compared = call.args
            compared = None if compared is raw else compared
            return replace(state, raw=raw, merge=self.merge_at[name], name=str(call.target), compared=compared)  # type: ignore[arg-type]
        return replace(state, raw=call) if stands.target is unmerge_tokens else state

    def read_of(self, node: fx.Node, read_P: Tensor | None) -> Tensor | None:
        """Which places of a node [B,N,C] count, bool, of those that count with all tokens: protected ones, None for all
        where any other may be merged.
        """
        tokens = sizes_at_one(node)[1]
        if read_P is None or len(read_P) == tokens:
            return read_P
        protected = next(iter(self.merge_at.values())).protected
        return None if bool(read_P[protected:].any()) else read_P[:tokens]
