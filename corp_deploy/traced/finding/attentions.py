"""Self-attentions over all tokens of a program, and the residual streams that they add to.

Legend: B inputs, H heads, N tokens, D dimensions of a head, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.attention_masks import find_attention_output, scores_and_softmax
from corp_deploy.traced.programs.program import (
    IN_FRONT,
    Program,
    batch_axis_of,
    module_of,
    named_arguments,
    operation,
    sizes_at_one,
)

from .cuts import find_bottlenecks, find_output_branches, input_free_nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """An attention: a fused op, which is its `product` and its `output`; or two products with a softmax between.

    `product` takes queries [B,H,N,D] and keys, [B,H,D,N] unless fused; `output` the softmax of `scores` [B,H,N,N],
    which are None if fused.
    """

    product: fx.Node
    output: fx.Node
    scores: fx.Node | None

    @property
    def queries(self) -> fx.Node:
        return self.product.all_input_nodes[0]

    @property
    def keys(self) -> fx.Node:
        return self.product.all_input_nodes[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The attentions that one sum `added` [B,N,C] adds to the stream `before`, in the module `path`."""

    path: str
    attentions: tuple[Attention, ...]
    before: fx.Node
    added: fx.Node

    @property
    def tokens(self) -> int:
        return int(sizes_at_one(self.added)[1])


def find_blocks(program: Program) -> tuple[Block, ...] | str:
    """Return blocks in order of the program, or the reason why its tokens form no stream between attentions.

    All blocks have streams of the same size. Of a program with several sizes, or with windows, these are consecutive
    blocks, two or more: those that compute most.
    """
    attentions = tuple(find_attentions(program))
    if not attentions:
        return "no attention of tokens is found in its program"
    constants = input_free_nodes(program)
    passed = {node for node, _ in find_bottlenecks(program, find_output_branches(program))}
    runs, reasons = [list[Block]()], list[str]()
    for each in attentions:
        block, last = _block_of(program, each, passed, constants), runs[-1][-1] if runs[-1] else None
        if isinstance(block, str):
            reasons.append(block)
            runs.append([])
        elif last is not None and last.added is block.added:
            runs[-1][-1] = replace(block, attentions=(*last.attentions, each))
        elif last is not None and sizes_at_one(last.added) != sizes_at_one(block.added):
            runs.append([block])
        else:
            runs[-1].append(block)
    most = max(runs, key=lambda run: sum(block.tokens * sizes_at_one(block.added)[2] ** 2 for block in run))
    if len(most) < 2 and len(runs) > 1:
        return reasons[0] if reasons else "its blocks have different numbers of tokens"
    if attentions[0] not in most[0].attentions and _joins_constants(program, most[0].added, constants):
        return "its blocks have different numbers of tokens, some of which are no patches, such as a class token"
    return tuple(most)


def _block_of(program: Program, attention: Attention, passed: set[fx.Node], constants: set[fx.Node]) -> Block | str:
    path, found = module_of(attention.product)[0] or "the model", _added(program, attention, constants)
    if found is None:
        number, *heads, tokens, _ = sizes_at_one(attention.queries)
        if len(heads) == 2 or (heads and number > 1):
            return f"the attention in {path} sees windows of {tokens} tokens, cut from a map that a merge would break"
        return f"the attention in {path} is added to no stream of its tokens, as on maps"
    added, before = found
    if added not in passed:
        return f"beside the stream that the attention in {path} is added to, other branches carry its tokens on"
    return Block(path=module_of(added)[0], attentions=(attention,), before=before, added=added)


def _joins_constants(program: Program, before: fx.Node, constants: set[fx.Node]) -> bool:
    """Check whether some tokens in front of a node are equal for all images."""
    earlier = takewhile(lambda node: node is not before, program.nodes)
    return any(operation(node) == "cat" and not constants.isdisjoint(node.all_input_nodes) for node in earlier)


def find_attentions(program: Program) -> Iterator[Attention]:
    """Yield the attentions with as many queries as keys, of tensors with a batch axis in front."""
    for node in program.nodes:
        output = find_attention_output(node)
        if output is not None and len(node.all_input_nodes) > 1:
            queries, keys = (sizes_at_one(each) for each in node.all_input_nodes[:2])
            if len(queries) > 2 and queries[-2] == keys[-2 if output is node else -1]:
                scores, _ = (output is not node and scores_and_softmax(node)) or (None, None)
                yield Attention(product=node, output=output, scores=scores)


def _added(program: Program, attention: Attention, constants: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Return the sum that adds an attention to a stream, and the stream; None if the first sum after it is another."""
    behind, tokens = {attention.product}, sizes_at_one(attention.queries)[-2]
    for node in program.nodes:
        if node.op != "call_function" or behind.isdisjoint(node.all_input_nodes):
            continue
        others = [each for each in node.all_input_nodes if each not in behind and each not in constants]
        if operation(node) in ("add", "add_") and others and len(node.all_input_nodes) == 2:
            sizes = sizes_at_one(node)
            is_stream = len(sizes) == 3 and sizes[1] == tokens and batch_axis_of(node) == IN_FRONT
            return (node, others[0]) if is_stream and sizes_at_one(others[0]) == sizes else None
        behind.add(node)
    return None


def count_leading_tokens(program: Program, stream: fx.Node) -> int | None:
    """Count the first tokens that are equal for all images, such as class tokens; None if later ones are too."""
    constants = input_free_nodes(program)

    @cache
    def is_same(node: fx.Node, dim: int) -> Tensor:
        """Return the mask of the places along an axis that depend on no image."""
        rank, size = len(sizes_at_one(node)), sizes_at_one(node)[dim]
        if node in constants or node.op != "call_function":
            return torch.full((size,), node in constants)
        arguments = named_arguments(node)
        if operation(node) == "cat" and arguments["dim"] % rank == dim:
            return torch.cat([is_same(each, dim) for each in arguments["tensors"]])
        if operation(node) == "slice" and arguments["dim"] == dim and arguments["step"] == 1:
            return is_same(arguments["self"], dim)[arguments["start"] :][:size]
        same = torch.ones(size, dtype=torch.bool)
        for each in node.all_input_nodes:
            sizes = sizes_at_one(each)
            if each not in constants and sizes is not None:
                is_alike = len(sizes) == rank and sizes[dim] == size
                same &= is_same(each, dim) if is_alike else torch.zeros_like(same)
        return same

    is_same_N = is_same(stream, 1)
    count = int(is_same_N.long().cumprod(0).sum())
    return count if count == int(is_same_N.sum()) else None
