"""Attention masks of a program: which keys queries attend to and which queries are read, where all images share it."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from .program import SAME, SHAPED, Program, operation, sizes_at_one
from .subprogram import needed, run

SDPA, SOFTMAX = "scaled_dot_product_attention", frozenset(("softmax", "_softmax"))
PRODUCTS = frozenset(("matmul", "bmm"))
_FAR = 50.0
"""What a score is below the largest of its query where the key isn't seen: less than float32 tells beside 1."""
_BETWEEN = frozenset(("add", "sub", "mul", "div", "masked_fill", "where")) | SAME | SHAPED
"""What stands between the two products of an attention, beside its softmax."""


def values_product(product: fx.Node) -> fx.Node | None:
    """What an attention gives of its product of queries and keys: itself, or the product that its softmax enters."""
    if operation(product) == SDPA:
        return product
    at, is_weight = product, False
    while operation(product) in PRODUCTS and len(at.users) == 1:
        before, (at,) = at, at.users
        if operation(at) in PRODUCTS:
            return at if is_weight and at.args[0] is before else None
        is_weight |= operation(at) in SOFTMAX
        if operation(at) not in _BETWEEN | SOFTMAX:
            return None
    return None


def added_scores(program: Program, product: fx.Node) -> Tensor | None:
    """What is added to an attention's products of queries and keys, a mask or positions [..., queries, keys], as
    it broadcasts to the products of one image; None where nothing is, or what is hangs on the inputs.
    """
    if operation(product) == SDPA:
        mask = argument(product, 3, "attn_mask")
        added = _whatever(program, mask, ()) if isinstance(mask, fx.Node) else None
        if added is None and mask is None and argument(product, 5, "is_causal"):
            added = torch.ones(*(sizes_at_one(each)[-2] for each in product.all_input_nodes[:2])).tril().bool()
        if added is not None and added.dtype == torch.bool:
            added = torch.zeros(added.shape, device=added.device).masked_fill(~added, -torch.inf)
        return added
    scores = _before_softmax(product)
    added = None if scores is None or scores is product else _whatever(program, scores, (product,))
    return added if added is not None and bool(added.any()) else None


def factor(program: Program, product: fx.Node) -> float | None:
    """What an attention's products of queries and keys are multiplied by on their way to its softmax; None where that
    is no one number, or hangs on the inputs.
    """
    if operation(product) == SDPA:
        scale = product.kwargs.get("scale")
        return float(sizes_at_one(product.all_input_nodes[0])[-1] ** -0.5 if scale is None else scale)  # type: ignore[arg-type]
    scores = _before_softmax(product)
    nodes = None if scores is None else needed(program, scores, (product,))[0]
    if scores is None or nodes is None:
        return None
    ones = torch.ones(sizes_at_one(product), device=_where(program))
    zero, one = (run(program, nodes, {product: each})[scores] for each in (torch.zeros_like(ones), ones))
    times = (one - zero)[zero.isfinite()]
    return float(times[0]) if torch.allclose(times, times[:1]) else None


def visible_keys(added: Tensor) -> Tensor:
    """Which keys each query sees with this beside its scores, bool."""
    return added > added.amax(-1, keepdim=True) - _FAR


def unread_queries(program: Program, output: fx.Node) -> Tensor | None:
    """Of the rows that a node gives for one image [..., rows] those that go nowhere, as padding is cut off; None where
    all are read, or that can't be told.
    """
    nodes = tuple(_behind(program, output))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.randn(sizes_at_one(output), generator=generator).to(_where(program)).requires_grad_()
        # In copies, as gradients can't go through what was made in inference mode.
        every = run(program, nodes, {output: start}, start.dtype)
        behind = dict.fromkeys((output, *nodes))
        ends = [every[node] for node in behind if not node.users or not behind.keys() >= node.users.keys()]
        ends = [each for each in ends if isinstance(each, Tensor) and each.requires_grad]
        weights = [torch.randn(each.shape, generator=generator).to(each) for each in ends]
        (slope,) = torch.autograd.grad(ends, start, weights)
    is_read = slope.ne(0).any(-1)
    return ~is_read if bool(is_read.any()) and not bool(is_read.all()) else None


def argument(node: fx.Node, place: int, name: str) -> object:
    """Given by its place, or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _whatever(program: Program, node: fx.Node, zero: tuple[fx.Node, ...]) -> Tensor | None:
    """What a node gives for one image whatever it is, with zeros for some other; None where images matter."""
    nodes, _ = needed(program, node, zero)
    if nodes is None:
        return None
    value: Tensor = run(program, nodes, {each: torch.zeros(sizes_at_one(each)).to(_where(program)) for each in zero})[
        node
    ]
    return value


def _where(program: Program) -> torch.device:
    return next(program.graph.parameters()).device


def _before_softmax(product: fx.Node) -> fx.Node | None:
    """The scores that are made of a product alone, as they enter their softmax."""
    at = product
    while len(at.users) == 1:
        (user,) = at.users
        if operation(user) in SOFTMAX:
            sizes, dim = sizes_at_one(at), argument(user, 1, "dim")
            is_over_keys = dim in (-1, len(sizes) - 1)
            return at if is_over_keys and sizes == sizes_at_one(product) else None
        if operation(user) not in _BETWEEN:
            return None
        at = user
    return None


def _behind(program: Program, start: fx.Node) -> Iterator[fx.Node]:
    """What is made of one node and constants, in order, with these."""
    behind, constants = {start}, set[fx.Node]()
    for node in program.nodes:
        if node.op != "call_function" or behind.isdisjoint(node.all_input_nodes):
            continue
        others = [needed(program, each, ())[0] for each in node.all_input_nodes if each not in behind]
        if None not in others:
            behind.add(node)
            constants.update(each for nodes in others for each in nodes or ())
    return (node for node in program.nodes if node in constants or (node in behind and node is not start))
