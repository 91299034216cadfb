"""A program copied node by node into one that merges tokens after its blocks' attentions.

Legend: B inputs, H heads, N tokens, D dimensions of a head, X dimensions compared.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from corp_deploy.spec.merging import Merging
from corp_deploy.traced.finding.attentions import Attention, Block
from corp_deploy.traced.finding.cuts import find_output_branches
from corp_deploy.traced.programs.attention_masks import SDPA, SOFTMAX, attention_scale
from corp_deploy.traced.programs.program import (
    IN_FRONT,
    Program,
    batch_axis_of,
    constant_names,
    named_arguments,
    operation,
    remove_dead_nodes_,
    sizes_at_one,
)
from corp_deploy.traced.programs.sizes import infer_sizes_
from ground.errors import BadInput

from .merged_nodes import MergedNodes
from .merged_program import MergedProgram
from .token_merging import TokenMerge, key_bias, unmerge_tokens
from .token_units import PositionDependent


@dataclass(slots=True, kw_only=True)
class MergeBuilder:
    """A builder of a MergedProgram; `follows`: see Mergeable.merged.

    `sizes`, `sources`: those of the current stream, None for all tokens. `tokens_at`: by name of a node of fewer tokens
    the merge before it, its sizes and sources. `back`: the unmerged inputs of branches to early outputs, by name.
    `biases`: those of fused attentions without sizes. `tracks`: merges track source tokens.
    """

    nodes: MergedNodes
    blocks: Sequence[Block]
    merging: Merging
    unmerging: fx.Node | None
    follows: bool
    merges: dict[str, TokenMerge] = field(default_factory=dict)
    tokens_at: dict[str, tuple[TokenMerge, fx.Node | None, fx.Node | None]] = field(default_factory=dict)
    back: dict[str, fx.Node] = field(default_factory=dict)
    biases: dict[fx.Node, Any] = field(default_factory=dict)
    tracks: bool = False
    sizes: fx.Node | None = None
    sources: fx.Node | None = None
    added: int = 0

    def build(self) -> MergedProgram:
        by_sum = {block.added: number for number, block in enumerate(self.blocks)}
        attentions = attentions_by_node([each for block in self.blocks for each in block.attentions])
        out = find_output_branches(self.nodes.program)
        self.tracks = self.tracks or self.follows or self.unmerging is not None
        self.tracks = self.tracks or (bool(out) and self.merging.how == "merge")
        for node in self.nodes.program.nodes:
            self._copy(node, attentions.get(node), {each for each, user in out if user is node})
            if node in by_sum:
                self._merge(by_sum[node])
            if node is self.unmerging:
                self._unmerge(node)
        inputs = [node.meta["val"] for node in self.nodes.graph.nodes if node.op == "placeholder"]
        return MergedProgram(
            program=build_sized_program(self.nodes, self.merges, inputs, dead=self.follows),
            stands={node.name: new for node, new in self.nodes.nodes.items()},
            merge_at={name: merge for name, (merge, _, _) in self.tokens_at.items()},
            sizes_at={name: sizes for name, (_, sizes, _) in self.tokens_at.items() if sizes is not None},
            sources_at={name: sources for name, (*_, sources) in self.tokens_at.items() if sources is not None},
        )

    def _copy(self, node: fx.Node, attention: Attention | None, leaving: set[fx.Node]) -> None:
        """Copy a node; its inputs `leaving` are on the way to an output in front of the last, and get unmerged."""
        nodes = self.nodes
        if leaving and self.merging.how == "merge":
            nodes.copy_(node, **{each.name: self._unmerged_input(each) for each in leaving if each in nodes.units})
        elif node.op == "output" or not nodes.is_behind(node):
            nodes.copy_(node)
        else:
            nodes.behind_(node, attention)
            if operation(node) == SDPA:
                self.biases[node] = nodes.nodes[node].args[3]
            if attention is not None and self.sizes is not None:
                self._count_sizes(node, nodes.nodes[node], attention)
            if node in nodes.units:
                self._note_tokens(node)

    def _unmerged_input(self, node: fx.Node) -> fx.Node:
        if node.name not in self.back:
            self.back[node.name] = self._new(
                unmerge_tokens, self.nodes.nodes[node], self.tokens_at[node.name][2], like=node
            )
        return self.back[node.name]

    def _new(self, function: Any, *args: Any, like: fx.Node) -> fx.Node:
        self.added += 1
        node = self.nodes.graph.create_node("call_function", function, args, {}, f"of_fewer_tokens_{self.added}")
        node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
        return node

    def _note_tokens(self, node: fx.Node) -> None:
        self.tokens_at[node.name] = list(self.merges.values())[-1], self.sizes, self.sources

    def _count_sizes(self, node: fx.Node, new: fx.Node, attention: Attention) -> None:
        """Add, in a softmax's or fused attention's scores, the log of the number of source tokens in each key."""
        is_softmax = operation(node) in SOFTMAX
        if not is_softmax and operation(node) != SDPA:
            return
        _refuse_layout(attention)
        scored = new.all_input_nodes[0]
        with self.nodes.graph.inserting_before(new):
            bias = self._new(_bias_like, self.sizes, scored, like=node)
            if is_softmax:
                new.args = (self._new(torch.ops.aten.add.Tensor, scored, bias, like=node), *new.args[1:])
        if not is_softmax:
            with self.nodes.graph.inserting_before(new):
                both = bias if new.args[3] is None else self._new(operator.add, new.args[3], bias, like=node)
            new.args = (*new.args[:3], both, *new.args[4:])

    def _merge(self, number: int) -> None:
        block, count = self.blocks[number], self.merging.schedule[number]
        if not count:
            return
        _, tokens = self.nodes.units.get(block.added, (block.tokens, block.tokens))
        how, metric = self.merging.how, self.merging.metric
        merge = TokenMerge(count=count, protected=self.nodes.protected, how=how, metric=metric, follows=self.tracks)
        name, used = f"{block.path}.merge".lstrip("."), {*self.merges}
        used |= {each.rpartition(".")[0] for each in constant_names(self.nodes.program.nodes)}
        while any(each == name or each.startswith(f"{name}.") for each in used):
            name += "_"
        stream = self.nodes.nodes[block.added]
        arguments = stream, self.sizes, self.sources, self._compared(block, stream)
        call = self.nodes.graph.create_node("call_module", name, arguments, {}, f"of_merge_{number}")
        call.meta["nn_module_stack"] = block.added.meta.get("nn_module_stack", {})
        parts = [self._new(operator.getitem, call, at, like=block.added) for at in range(3)]
        self.merges[name] = merge
        self.nodes.nodes[block.added], sizes, sources = parts
        self.sizes = sizes if how == "merge" else None
        self.sources = self.nodes.means.sources = sources if self.tracks else None
        self.nodes.begin_(block.added, tokens - count)
        self._note_tokens(block.added)

    def _compared(self, block: Block, stream: fx.Node) -> fx.Node:
        if not self.merging.compares_attention:
            return stream
        by_attention = self.merging.how == "drop" or self.merging.metric == "attended"
        if len(block.attentions) > 1 and by_attention:
            raise PositionDependent(
                block.added, "adds several attentions, each of which may keep other tokens; merge by another metric"
            )
        for each in block.attentions:
            _refuse_layout(each)
        if not by_attention:
            like, of_heads = block.added, [(each, self.nodes.nodes[each.keys]) for each in block.attentions]
            keys = [self._new(_keys, stands, each.scores is not None, like=like) for each, stands in of_heads]
            return keys[0] if len(keys) == 1 else self._new(torch.cat, keys, -1, like=like)
        if not self.nodes.protected:
            raise BadInput(
                "merging: keeping what the class token attends to needs a class token; merge by another metric"
            )
        return self._attention(block.attentions[0], block.added)

    def _attention(self, attention: Attention, like: fx.Node) -> fx.Node:
        stands = self.nodes.nodes
        if attention.scores is not None and self.merging.how == "merge":  # scores without the sizes added
            return self._new(_of_first_scores, stands[attention.scores], like=like)
        if attention.scores is not None:
            (softmax,) = attention.scores.users
            return self._new(_of_first, stands[softmax], like=like)
        product, scale = attention.product, attention_scale(attention.product)
        bias = self.biases.get(product, stands.get(named_arguments(product)["attn_mask"]))
        return self._new(_attended, stands[attention.queries], stands[attention.keys], scale, bias, like=like)

    def _unmerge(self, node: fx.Node) -> None:
        if node in self.nodes.units:
            self.nodes.nodes[node] = self._new(unmerge_tokens, self.nodes.nodes[node], self.sources, like=node)
            del self.nodes.units[node], self.nodes.axes[node], self.nodes.values[node], self.tokens_at[node.name]
            self.sizes = self.sources = None


def _refuse_layout(attention: Attention) -> None:
    queries = attention.queries
    if len(sizes_at_one(queries)) != 4 or batch_axis_of(queries) != IN_FRONT:
        raise PositionDependent(
            attention.product, "has heads and images on one axis, so that sizes can't be added to scores"
        )


def _bias_like(sizes_BN: Tensor, scored: Tensor) -> Tensor:
    return key_bias(sizes_BN, scored.dtype)


def _keys(keys: Tensor, is_turned: bool) -> Tensor:
    """Concatenate the keys of all heads [B,N,X] from [B,H,N,D] or [B,H,D,N]."""
    keys_BNHD = keys.permute(0, 3, 1, 2) if is_turned else keys.transpose(1, 2)
    return keys_BNHD.flatten(2)


def _of_first(shares_BHNN: Tensor) -> Tensor:
    """Return the first token's attention to each token [B,N], the mean over heads."""
    return shares_BHNN[:, :, 0].float().mean(dim=1)


def _of_first_scores(scores_BHNN: Tensor) -> Tensor:
    return scores_BHNN[:, :, 0].softmax(-1, dtype=torch.float32).mean(dim=1)


def _attended(q_BHND: Tensor, k_BHND: Tensor, scale: float, bias_BHNN: Tensor | None) -> Tensor:
    scores_BHN = ((q_BHND[:, :, :1] * scale) @ k_BHND.transpose(-2, -1)).squeeze(2)
    if bias_BHNN is not None:
        scores_BHN = scores_BHN + bias_BHNN[..., 0, :]
    return scores_BHN.softmax(-1, dtype=torch.float32).mean(dim=1)


def attentions_by_node(attentions: Iterable[Attention]) -> dict[fx.Node, Attention]:
    """Return attentions by their nodes that mix tokens: products and softmaxes, or the fused op."""
    return {
        node: each
        for each in attentions
        for node in (each.product, each.output, *(() if each.scores is None else each.scores.users))
    }


def build_sized_program(
    nodes: MergedNodes, merges: Mapping[str, TokenMerge], inputs: Sequence[Tensor], *, dead: bool
) -> Program:
    """Build the program of copied nodes, and infer its sizes; with `dead` it keeps nodes without users."""
    program = nodes.program
    nodes.graph.set_codegen(copy(program.graph.graph._codegen))
    root: dict[str, Any] = {name: program.tensor(name) for name in constant_names(nodes.graph.nodes)}
    if not dead:
        remove_dead_nodes_(nodes.graph)
    graph = fx.GraphModule({**merges, **root}, nodes.graph).eval()
    infer_sizes_(graph, inputs, any_batch=True)
    return Program(graph=graph, model=program.model, any_batch=True, folded=program.folded)
