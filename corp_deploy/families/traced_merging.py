"""Token merging in traced models: where tokens of a program can be merged, and a model whose program merges them."""

from dataclasses import dataclass

from torch import fx

from corp_deploy.traced.finding.attentions import Block, blocks_of, in_front
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import without_biases_
from ground.errors import BadInput

from .merging import Merging, capped
from .traced_fewer import Fewer, fewer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Mergeable:
    """The blocks of a program, each an attention and what follows, and how many tokens in front are never merged."""

    blocks: tuple[Block, ...]
    protected: int

    @property
    def tokens(self) -> int:
        """That enter each block."""
        return self.blocks[0].tokens

    def merged(self, program: Program, merging: Merging, *, follows: bool = False) -> Fewer:
        """See fewer_tokens. Raises BadInput where the merging doesn't fit too."""
        if len(merging.schedule) != len(self.blocks):
            raise BadInput(
                f"merging: a schedule of {len(merging.schedule)} entries for {len(self.blocks)} blocks; "
                "give one a block"
            )
        return fewer_tokens(program, self.blocks, self.protected, merging, follows=follows)


def mergeable(program: Program) -> Mergeable | str:
    """Or why its tokens can't be merged."""
    if not program.any_batch:
        return "its program is for one batch size alone"
    blocks = blocks_of(program)
    if isinstance(blocks, str):
        return blocks
    if len({block.tokens for block in blocks}) > 1:
        return "its blocks have different numbers of tokens"
    protected = in_front(program, blocks[0].before)
    if protected is None:
        return "tokens that are no patches, such as a class token, stand elsewhere than in front"
    found = Mergeable(blocks=blocks, protected=protected)
    one_each = capped((1,) * len(blocks), "merge", found.tokens, protected)
    try:
        found.merged(program, Merging(schedule=one_each))
    except BadInput as error:
        return str(error).removeprefix("token merging: ").partition("; leave --merge-tokens")[0]
    return found


def merged_graph(program: Program, added: tuple[str, ...], merging: Merging) -> fx.GraphModule:
    """What a model runs that merges so: its program without biases that it hasn't."""
    found = mergeable(program)
    if isinstance(found, str):
        raise BadInput(f"token merging: {found}; leave --merge-tokens away")
    graph = found.merged(program, merging).program.graph
    without_biases_(graph, tuple(name for name in added if name in dict(graph.named_parameters())))
    return graph
