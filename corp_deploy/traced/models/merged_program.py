"""A traced program with token merging: merges after some attentions, all other nodes under the same names."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from corp_deploy.traced.programs.program import Program, sizes_at_one

from .token_merging import TokenMerge, unmerge_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CutState:
    """The stream at a cut: `raw` before and `node` after the merge or unmerge there, which may be the same.

    If `node` is merged, `sizes` and `sources` are those of its tokens. `merge` compares tokens by `compared`, None for
    the stream itself, and is called `name`.
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
        """The nodes of sizes and sources beside the stream, without those that are None."""
        return tuple(each for each in (self.sizes, self.sources) if each is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedProgram:
    """A program that merges tokens, with tables by the names of nodes of the program with all tokens.

    `stands`: the node of `program` in place of each. `merge_at`, `sizes_at`, `sources_at`: for nodes of fewer tokens,
    the merge before them and the nodes that give its sizes and sources.
    """

    program: Program
    stands: Mapping[str, fx.Node]
    merge_at: Mapping[str, TokenMerge]
    sizes_at: Mapping[str, fx.Node]
    sources_at: Mapping[str, fx.Node]

    def crossing(self, node: fx.Node) -> CutState:
        """Return the state at a cut, given by its node of the program with all tokens."""
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
        """Return the mask of tokens of a node [B,N,C] that are read, from the mask `read_P` for all tokens.

        None stands for all, also if an unprotected token is read: it may be merged anywhere.
        """
        tokens = sizes_at_one(node)[1]
        if read_P is None or len(read_P) == tokens:
            return read_P
        protected = next(iter(self.merge_at.values())).protected
        return None if bool(read_P[protected:].any()) else read_P[:tokens]
