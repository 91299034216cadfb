"""Token merging in traced models: blocks with attentions after which tokens can merge, and programs that merge them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from corp_deploy.spec.merging import Merging, cap_schedule, tokens_after
from corp_deploy.traced.finding.attentions import Block, count_leading_tokens, find_attentions, find_blocks
from corp_deploy.traced.finding.cuts import find_bottlenecks, find_output_branches
from corp_deploy.traced.finding.product import count_node_macs
from corp_deploy.traced.programs.program import (
    Program,
    constant_names,
    operation,
    set_tensor_,
    sizes_at_one,
)
from corp_deploy.traced.programs.readers import remove_biases_
from corp_deploy.traced.programs.sizes import infer_sizes_
from ground.errors import BadInput

from .merged_nodes import MergedNodes
from .merged_program import MergedProgram
from .merges import MergeBuilder, attentions_by_node, build_sized_program
from .mlp_merging import build_mlp_merged_program
from .position_means import UntrackedSources, even_sources
from .token_units import PositionDependent


@dataclass(frozen=True, slots=True, kw_only=True)
class Mergeable:
    """The blocks of a program whose tokens can be merged, and the number of first tokens that never are."""

    blocks: tuple[Block, ...]
    protected: int

    @property
    def tokens(self) -> int:
        return self.blocks[0].tokens

    @property
    def channels(self) -> int:
        """The number of channels of the stream that attentions are added to."""
        return int(sizes_at_one(self.blocks[0].added)[2])

    def merged(self, program: Program, merging: Merging, *, follows: bool = False) -> MergedProgram:
        """Build the program that merges tokens after its blocks' attentions.

        With `follows` merges always track source tokens. Raises BadInput if the merging doesn't fit, or if a node
        needs all tokens.
        """
        if len(merging.schedule) != len(self.blocks):
            raise BadInput(
                f"merging: a schedule of {len(merging.schedule)} entries for {len(self.blocks)} blocks; "
                "give one entry for each block"
            )
        tokens_after(merging, self.tokens, self.protected)

        def rewritten(unmerging: fx.Node | None, *, tracks: bool = False) -> MergedProgram:
            nodes = MergedNodes(program=program, protected=self.protected, as_before=merging.how == "drop")
            builder = MergeBuilder(
                nodes=nodes, blocks=self.blocks, merging=merging, unmerging=unmerging, follows=follows, tracks=tracks
            )
            try:
                return builder.build()
            except UntrackedSources:
                return rewritten(unmerging, tracks=True)

        try:
            merged, reader = rewritten(None), None
            if not merging.unmerged:
                return merged
        except PositionDependent as read:
            reason, reader = read, read.node
        unmerging = None if merging.how == "drop" else _last_stream(program, self.blocks, reader)
        try:
            if unmerging is None:
                raise reason
            return rewritten(unmerging)
        except PositionDependent as still:
            raise BadInput(f"token merging: {still}; leave --merge-tokens out") from None


def _find_mergeable_blocks(program: Program) -> Mergeable | str:
    """Return the blocks after which tokens may merge, without a look at what is behind them, or why there are none."""
    if not program.any_batch:
        return "its program is for one batch size alone"
    blocks = find_blocks(program)
    if isinstance(blocks, str):
        return blocks
    protected = count_leading_tokens(program, blocks[0].before)
    if protected is None:
        return "tokens that are no patches, such as a class token, stand elsewhere than in front"
    return Mergeable(blocks=blocks, protected=protected)


def find_mergeable(program: Program) -> Mergeable | str:
    """Return the blocks after which a program's tokens can be merged, or the reason why they can't."""
    found = _find_mergeable_blocks(program)
    if isinstance(found, str):
        return found
    one_each = cap_schedule((1,) * len(found.blocks), "merge", found.tokens, found.protected)
    try:
        found.merged(program, Merging(schedule=one_each))
    except BadInput as error:
        return str(error).removeprefix("token merging: ").partition("; leave --merge-tokens")[0]
    return found


def build_merged_graph(program: Program, added: tuple[str, ...], merging: Merging) -> fx.GraphModule:
    """Build the graph of a model that merges tokens, without the biases `added` that the model itself lacks."""
    if merging.in_stream:
        found = _find_mergeable_blocks(program)
        if isinstance(found, str):
            raise BadInput(f"token merging: {found}; leave --merge-tokens out")
        graph = found.merged(program, merging).program.graph
    else:
        graph = build_mlp_merged_program(program, merging).graph
    _add_unused_(graph, program)
    remove_biases_(graph, tuple(name for name in added if name in dict(graph.named_parameters())))
    return graph


def _add_unused_(graph: fx.GraphModule, program: Program) -> None:
    """Add the program's constants that a graph lacks: of several equal tables, only one is averaged."""
    known = graph.state_dict()
    for name in [name for name in constant_names(program.nodes) if name not in known]:
        owner = name.rpartition(".")[0]
        if owner not in dict(graph.named_modules()):
            graph.add_submodule(owner, nn.Module())
        set_tensor_(graph, name, program.tensor(name))


def program_at_tokens(piece: Program, protected: int, tokens: int) -> Program:
    """Rebuild a part of a program that one stream [B,N,C] enters for fewer tokens; raise BadInput if it needs all."""
    (entering,) = piece.inputs
    infer_sizes_(piece.graph, [entering.meta["val"]], any_batch=True)
    nodes = MergedNodes(program=piece, protected=protected, as_before=True)
    attentions = attentions_by_node(find_attentions(piece))
    try:
        for node in piece.nodes:
            if node.op == "output" or operation(node) == "sym_size" or not nodes.is_behind(node):
                nodes.copy_(node)
            else:
                nodes.behind_(node, attentions.get(node))
            if node is entering:
                nodes.begin_(node, tokens)
                sources = nodes.nodes[node], nodes.stream[0], tokens
                nodes.means.sources = nodes.graph.call_function(even_sources, sources)
    except PositionDependent as reason:
        raise BadInput(f"{piece.model}: {reason}, so that it can't be timed with fewer") from None
    return build_sized_program(nodes, {}, [nodes.values[entering]], dead=False)


def _last_stream(program: Program, blocks: Sequence[Block], before: fx.Node | None) -> fx.Node | None:
    last, stream = None, sizes_at_one(blocks[-1].added)
    for node, since in find_bottlenecks(program, find_output_branches(program)):
        if before in since:
            break
        is_cut = sizes_at_one(node) == stream and any(map(count_node_macs, since))
        if node is blocks[-1].added or (last is not None and is_cut):
            last = node
    return last
