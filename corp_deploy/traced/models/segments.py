"""Consecutive segments of a traced program, and the streams between them as rows [B,N,C].

Legend: B inputs, N places of a stream, C channels.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from corp_deploy.traced.finding.cuts import extract_between, find_cuts, outputs_after, required_nodes, side_inputs
from corp_deploy.traced.finding.product import is_contraction
from corp_deploy.traced.finding.sites import FoundSites, common_path
from corp_deploy.traced.programs.program import Program, constant_names, operation, sizes_at_one, tensor_of

from .merged_program import CutState, MergedProgram
from .token_merging import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a tensor: its sizes after the batch, and the axis of channels, counted with the batch's."""

    sizes: tuple[int, ...]
    axis: int

    def rows(self, x: Tensor) -> Tensor:
        """Reshape the tensor to [B,N,C]."""
        return x.movedim(self.axis, -1).reshape(len(x), -1, self.sizes[self.axis - 1])

    def tensor(self, x_BNC: Tensor) -> Tensor:
        """Reshape [B,N,C] to the tensor."""
        places = self.sizes[: self.axis - 1] + self.sizes[self.axis :]
        return x_BNC.reshape(len(x_BNC), *places, x_BNC.shape[-1]).movedim(-1, self.axis)


def layout_of(node: fx.Node, image: tuple[int, ...]) -> Layout:
    """Return the layout of a node's result: channels are the last axis, unless it is a map [B,C,H,W].

    Of a map's axes, the two whose proportions are nearer to those of the image [C,H,W] are its places.
    """
    sizes = sizes_at_one(node)[1:]
    if len(sizes) != 3 or len(image) != 3:
        return Layout(sizes=sizes, axis=len(sizes))
    log_aspect = math.log(image[1] / image[2])
    first, last = (abs(math.log(one / other) - log_aspect) for one, other in pairwise(sizes))
    return Layout(sizes=sizes, axis=1 if last <= first else 3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramSegment:
    """The program between two cuts: a `module` [B,...] -> [B,...] with the model's own parameters, named by `weights`.

    `name`: the path that all modules of its contractions share, unique. `start`, `end`: the streams at the cuts. `cut`:
    the node after it in the program with all tokens. `beside`: further inputs of the module, a mask or the sizes of
    merged tokens and their sources. In front of a merge the module also gives what tokens are compared by.
    """

    name: str
    start: CutState
    end: CutState
    cut: fx.Node
    module: fx.GraphModule
    weights: frozenset[str]
    beside: tuple[fx.Node, ...]

    @property
    def before(self) -> fx.Node:
        return self.start.node

    @property
    def after(self) -> fx.Node:
        return self.end.raw


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutOutputs:
    """Outputs of a model with several, computed from the stream at one cut, `before`; `numbers`: their indices.

    `takes_sources`: the module also takes the places of source tokens. It gives a tuple.
    """

    name: str
    before: fx.Node
    takes_sources: bool
    numbers: tuple[int, ...]
    module: fx.GraphModule

    def __call__(self, tokens: Tokens, image: tuple[int, ...], others: Iterable[Tensor]) -> dict[int, Tensor]:
        """Compute the outputs by number; `others` are the inputs beside the first, for one text."""
        x = layout_of(self.before, image).tensor(tokens.x)
        beside = [each.expand(len(x), *each.shape[1:]) for each in others]
        if self.takes_sources and tokens.sources is not None:
            beside.append(tokens.sources)
        return dict(zip(self.numbers, self.module(x, *beside), strict=True))


def crossing(merged: MergedProgram | None, node: fx.Node) -> CutState:
    """Return the state at the cut `node`, with nodes of the program `merged` if tokens are merged."""
    return CutState(raw=node, node=node) if merged is None else merged.crossing(node)


def find_cut_outputs(analysis: FoundSites, merged: MergedProgram | None = None) -> tuple[CutOutputs, ...]:
    """Find all outputs of a model with several, each from the last stream that it depends on, in order of streams.

    None are found for a model with one output, or if an output depends on no stream at a cut. `merged`: the program
    that runs if tokens are merged.
    """
    program, running = analysis.program, analysis.program if merged is None else merged.program
    leaves, now = (tree_leaves(each.output.args[0]) for each in (program, running))
    if len(leaves) == 1 or not all(isinstance(leaf, fx.Node) for leaf in leaves):
        return ()
    every, left, found_outputs = find_cuts(analysis, beside_outputs=True), set(range(len(leaves))), list[CutOutputs]()
    for cut in reversed(every):
        behind, at = set(outputs_after(program, cut.node)), crossing(merged, cut.node)
        numbers = tuple(sorted(number for number in left if leaves[number] in behind))
        if numbers:
            outputs = [now[number] for number in numbers]
            beside = _nodes_beside(running, at, outputs)
            assert at.sizes not in beside or at.sizes is None, cut
            module = extract_between(running, at.node, None, beside=beside, outputs=outputs)
            of_cut = CutOutputs(
                name=cut.name, before=at.node, takes_sources=bool(beside), numbers=numbers, module=module
            )
            found_outputs.insert(0, of_cut)
            left.difference_update(numbers)
    is_to_last = bool(found_outputs) and found_outputs[-1].before is crossing(merged, every[-1].node).node
    return tuple(found_outputs) if is_to_last and not left else ()


def _nodes_beside(program: Program, at: CutState, ends: list[fx.Node]) -> tuple[fx.Node, ...]:
    nodes = required_nodes(program, at.node, ends, beside=at.token_state)
    return tuple(info for info in at.token_state if info in ends or any(info in node.all_input_nodes for node in nodes))


def find_segments(analysis: FoundSites, merged: MergedProgram | None = None) -> tuple[ProgramSegment, ...]:
    """Find the segments in order, from the input to the output or to the last stream that several outputs depend on.

    There are none if the model takes more than one tensor and its mask, if several outputs depend on no such stream or
    have sites after it, or if the program `merged` merges tokens at no cut.
    """
    program = analysis.program
    inputs, output = program.inputs, single_output(program)
    masks = side_inputs(program)
    if len(inputs) > 1 + len(masks) or len(masks) > 1 or not all(map(_is_mask, masks)):
        return ()
    if output is not None:
        at, every = find_cuts(analysis), find_cuts(analysis, to_end=True)
        streams = [cut for cut in every[len(at) :] if cut.node is not output and len(sizes_at_one(cut.node)) == 3]
        return _segments(analysis, [inputs[0], *(cut.node for cut in (*at, *streams)), output], merged)
    last = find_cut_outputs(analysis)[-1:]
    weights = {name for each in last for name in constant_names(each.module.graph.nodes)}
    if not last or any(span.name in weights for site in analysis.sites for span in (*site.writers, *site.readers)):
        return ()
    return _segments(analysis, [inputs[0], *(cut.node for cut in find_cuts(analysis, beside_outputs=True))], merged)


def _is_mask(node: fx.Node) -> bool:
    return node.name.endswith("mask") and len(sizes_at_one(node)) == 2


def build_full_masks(program: Program, count: int, where: torch.device) -> dict[fx.Node, Tensor]:
    """Build, by node, the inputs after the first for `count` texts without padding: masks of ones, others of zeros."""
    return {
        node: torch.full(
            (count, *sizes_at_one(node)[1:]), int(_is_mask(node)), dtype=node.meta["val"].dtype, device=where
        )
        for node in side_inputs(program)
    }


def _segments(analysis: FoundSites, at: list[fx.Node], merged: MergedProgram | None) -> tuple[ProgramSegment, ...]:
    running, crossings = analysis.program if merged is None else merged.program, [crossing(merged, node) for node in at]
    masks, count, every = side_inputs(running), Counter[str](), list[ProgramSegment]()
    for start, end, cut in zip(crossings, crossings[1:], at[1:], strict=False):
        outputs = None if end.compared is None else [end.raw, end.compared]
        beside = _nodes_beside(running, start, outputs or [end.raw])
        before, after = start.node, None if end.raw is single_output(running) else end.raw
        module = extract_between(running, before if every else None, after, beside=beside, outputs=outputs)
        beside = (*masks, *beside)
        name = common_path([node for node in module.graph.nodes if is_contraction(node)] or [end.raw])
        count[name] += 1
        name = name if count[name] == 1 else f"{name}#{count[name]}"
        weights = frozenset(constant_names(module.graph.nodes))
        every.append(
            ProgramSegment(name=name, start=start, end=end, cut=cut, module=module, weights=weights, beside=beside)
        )
    merges = any(node.op == "call_module" for each in every for node in each.module.graph.nodes)
    return () if merges else tuple(every)


def single_output(program: Program) -> fx.Node | None:
    """Return the program's output if that is one tensor, else None."""
    output = program.output
    is_one = program.graph.graph._codegen.pytree_info.out_spec.is_leaf()  # type: ignore[attr-defined]
    return output.all_input_nodes[0] if is_one and sizes_at_one(output.all_input_nodes[0]) else None


class TokenRows(nn.Module):
    """A segment that takes and gives rows [B,N,C].

    Beside the stream it may take weights [B,N] of tokens, a mask or sizes, and the sources of merged tokens.
    """

    def __init__(self, segment: ProgramSegment, image: tuple[int, ...]) -> None:
        super().__init__()
        self.module, self.compares = segment.module, segment.end.compared is not None
        self.entering, self.leaving = (layout_of(node, image) for node in (segment.before, segment.after))
        self.beside = tuple((each is segment.start.sources, each.meta["val"].dtype) for each in segment.beside)

    def tensors(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """Return the segment module's inputs: the stream in its own layout, and the weights and sources it takes."""
        every = ((tokens.sources if is_sources else tokens.sizes, dtype) for is_sources, dtype in self.beside)
        beside = (each.to(dtype).expand(len(tokens.x), -1) for each, dtype in every if each is not None)
        return (self.entering.tensor(tokens.x), *beside)

    def compared(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the stream after the segment and what tokens are compared by, None for the stream itself."""
        tensors = self.module(*self.tensors(tokens))
        x, compared_BNX = tensors if self.compares else (tensors, None)
        return self.leaving.rows(x), compared_BNX

    def forward(self, x_BNC: Tensor, weights_BN: Tensor | None = None, sources_BM: Tensor | None = None) -> Tensor:
        return self.compared(Tokens(x_BNC, weights_BN, sources_BM))[0]


def cost_signature_of(graph: fx.Graph, tensors: fx.GraphModule) -> str:
    """Return a text that is equal for graphs of the same operations on tensors of the same sizes."""
    place, lines = {node: at for at, node in enumerate(graph.nodes)}, list[str]()
    for node in graph.nodes:
        sizes: Any = sizes_at_one(node)
        if node.op == "get_attr":
            sizes = tuple(tensor_of(tensors, str(node.target)).shape)
        arguments = fx.node.map_aggregate((node.args, node.kwargs), lambda each: place.get(each, each))
        lines.append(f"{operation(node)} {arguments} {sizes}")
    return "\n".join(lines)
