"""Multiply-adds of a node at a batch of 1, by the shapes of the program."""

import math

from torch import fx

from corp_deploy.traced.programs.program import operation, sizes_at_one

from .flow import call_of
from .product import equation_of


def macs(node: fx.Node) -> int:
    """Of contractions; whatever works element by element is not counted."""
    op = operation(node)
    if op.startswith("conv") and op[-1] == "d":
        arguments = call_of(node, {}).arguments
        places = arguments["input"] if "transpose" in op else node
        return int(math.prod(sizes_at_one(places)) * math.prod(sizes_at_one(arguments["weight"])[1:]))
    if op == "scaled_dot_product_attention":
        query, key, value = (sizes_at_one(each) for each in node.args[:3])  # type: ignore[arg-type]
        return int(math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    equation = equation_of(node)
    return 0 if equation is None else math.prod(equation.sizes.values())


def contracts(node: fx.Node) -> bool:
    """Whether it sums products, or stands for what would where a layer reads nothing and gives a constant."""
    return operation(node) == "linear" or macs(node) > 0 or 0 in (sizes_at_one(node) or ())
