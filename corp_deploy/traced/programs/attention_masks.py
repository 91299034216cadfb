"""Attentions of a program: their softmax, output and scale, masks that no input changes, and unread queries."""

from itertools import pairwise

import torch
from torch import Tensor, fx

from .program import SAME, SHAPED, Program, named_arguments, operation, sizes_at_one
from .subprogram import evaluate_nodes, nodes_to_run

SDPA, SOFTMAX = "scaled_dot_product_attention", frozenset(("softmax", "_softmax"))
PRODUCTS = frozenset(("matmul", "bmm"))
_FAR = 50.0
"""The distance below a query's largest score from which a key is hidden: float32 loses its exponential beside 1."""
_BETWEEN = frozenset(("add", "sub", "mul", "div", "masked_fill", "where")) | SAME | SHAPED
"""The ops that may stand between the two products of an attention, besides the softmax."""


def _path_after(product: fx.Node) -> list[fx.Node]:
    path = [product]
    while len(path[-1].users) == 1 and (len(path) == 1 or operation(path[-1]) in _BETWEEN | SOFTMAX):
        path += path[-1].users
    return path


def scores_and_softmax(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the nodes of the scores that enter the softmax after a product, and of the softmax; None without one."""
    path = pairwise(_path_after(product))
    return next(((each, behind) for each, behind in path if operation(behind) in SOFTMAX), None)


def find_attention_output(product: fx.Node) -> fx.Node | None:
    """Return the node of an attention's output: the fused op itself, or the product with values; None if neither."""
    if operation(product) == SDPA:
        return product
    *path, last = _path_after(product)
    is_one = bool(path) and {operation(product), operation(last)} <= PRODUCTS and last.args[0] is path[-1]
    return last if is_one and scores_and_softmax(product) is not None else None


def added_scores(program: Program, product: fx.Node) -> Tensor | None:
    """Return the mask or position bias [..., queries, keys] that an attention adds to the scores of one image.

    Hidden keys of a boolean mask get -inf. Returns None if nothing is added, or if the mask depends on the inputs.
    """
    if operation(product) == SDPA:
        arguments = named_arguments(product)
        mask = arguments["attn_mask"]
        added = None if mask is None else _input_free_value(program, mask, ())
        if mask is None and arguments["is_causal"]:
            added = torch.ones(*(sizes_at_one(each)[-2] for each in product.all_input_nodes[:2])).tril().bool()
        if added is not None and added.dtype == torch.bool:
            added = torch.zeros(added.shape, device=added.device).masked_fill(~added, -torch.inf)
        return added
    scores = _before_softmax(product)
    added = None if scores is None or scores is product else _input_free_value(program, scores, (product,))
    return added if added is not None and bool(added.any()) else None


def score_factor(program: Program, product: fx.Node) -> float | None:
    """Return the number that scores are multiplied by before the softmax; None if it is not one number."""
    if operation(product) == SDPA:
        return attention_scale(product)
    scores = _before_softmax(product)
    nodes = None if scores is None else nodes_to_run(program, [scores], (product,))[0]
    if scores is None or nodes is None:
        return None
    ones = torch.ones(sizes_at_one(product), device=program.device)
    zero, one = (evaluate_nodes(program, nodes, {product: each})[scores] for each in (torch.zeros_like(ones), ones))
    times = (one - zero)[zero.isfinite()]
    return float(times[0]) if torch.allclose(times, times[:1]) else None


def attention_scale(product: fx.Node) -> float:
    """Return the scale of a fused attention, by default the inverse root of its queries' dimensions."""
    scale = named_arguments(product)["scale"]
    return float(product.all_input_nodes[0].meta["val"].shape[-1] ** -0.5 if scale is None else scale)


def visible_keys(added: Tensor) -> Tensor:
    """Return the mask [..., queries, keys] of keys that each query sees if `added` of that shape is added to scores."""
    return added > added.amax(-1, keepdim=True) - _FAR


def unread_queries(program: Program, output: fx.Node) -> Tensor | None:
    """Return the mask of a node's rows that no later node reads, such as padding; None if all or none seem read."""
    nodes = _nodes_after(program, output)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.randn(sizes_at_one(output), generator=generator).to(program.device).requires_grad_()
        # The constants are copied, as gradients can't pass tensors that were made in inference mode.
        every = evaluate_nodes(program, nodes, {output: start}, start.dtype)
        behind = dict.fromkeys((output, *nodes))
        ends = [every[node] for node in behind if not node.users or not behind.keys() >= node.users.keys()]
        ends = [each for each in ends if isinstance(each, Tensor) and each.requires_grad]
        weights = [torch.randn(each.shape, generator=generator).to(each) for each in ends]
        (slope,) = torch.autograd.grad(ends, start, weights)
    is_read = slope.ne(0).any(-1)
    return ~is_read if bool(is_read.any()) and not bool(is_read.all()) else None


def _input_free_value(program: Program, node: fx.Node, zero: tuple[fx.Node, ...]) -> Tensor | None:
    """Return a node's value with zeros in place of the nodes `zero`; None if it depends on the inputs."""
    nodes, _ = nodes_to_run(program, [node], zero)
    zeros = {each: torch.zeros(sizes_at_one(each), device=program.device) for each in zero}
    return None if nodes is None else evaluate_nodes(program, nodes, zeros)[node]


def _before_softmax(product: fx.Node) -> fx.Node | None:
    found = scores_and_softmax(product)
    if found is None or sizes_at_one(found[0]) != sizes_at_one(product):
        return None
    return found[0] if named_arguments(found[1])["dim"] in (-1, len(sizes_at_one(product)) - 1) else None


def _nodes_after(program: Program, start: fx.Node) -> tuple[fx.Node, ...]:
    behind = {start}
    for node in program.nodes:
        if node.op == "call_function" and not behind.isdisjoint(node.all_input_nodes):
            others = [each for each in node.all_input_nodes if each not in behind]
            if nodes_to_run(program, others, ())[0] is not None:
                behind.add(node)
    return nodes_to_run(program, behind, (start,))[0] or ()
