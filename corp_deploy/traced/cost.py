"""Multiply-adds of a node at a batch of 1, by the shapes of the program."""

import math

from torch import fx

from .call import call_of
from .names import named
from .program import operation, sizes_at_one

_BY_SUM = named(
    """
    matmul mm bmm addmm baddbmm einsum
    """
)


def macs(node: fx.Node) -> int:
    """Of contractions; whatever works element by element is not counted."""
    op = operation(node)
    if op == "linear" or (op.startswith("conv") and op[-1] == "d"):
        weight = call_of(node, {}).arguments["weight"]
        out = sizes_at_one(node)
        of_one = math.prod(sizes_at_one(weight)[1:])
        if "transpose" in op:
            of_one, out = math.prod(sizes_at_one(weight)[1:]), sizes_at_one(node.args[0])  # type: ignore[arg-type]
        return int(math.prod(out) * of_one)
    if op == "scaled_dot_product_attention":
        query, key, value = (sizes_at_one(each) for each in node.args[:3])  # type: ignore[arg-type]
        return int(math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    if op in _BY_SUM:
        return _of_product(node)
    return 0


def _of_product(node: fx.Node) -> int:
    """Every factor's elements meet those of the other along the axes that the result lacks."""
    shapes = [sizes_at_one(each) for each in node.all_input_nodes[-2:]]
    if len(shapes) < 2 or None in shapes:
        return 0
    if operation(node) == "einsum":
        terms = str(node.args[0]).replace(" ", "").partition("->")[0].split(",")
        if "." not in "".join(terms):
            each = zip("".join(terms), [size for shape in shapes for size in shape], strict=False)
            return math.prod(dict(each).values())
    return int(math.prod(sizes_at_one(node)) * shapes[0][-1])
