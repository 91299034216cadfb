"""Products of two tensors by letters, one an axis, as einsum names them: `abK,NK->abN` for a linear layer."""

import string
from dataclasses import dataclass
from typing import Any

from torch import fx

from corp_deploy.traced.programs.program import operation, sizes_at_one

from .call import call_of

FRONT, FREE = "abcdefghijklmn", string.ascii_lowercase
_FACTORS = {
    "linear": ("input", "weight"),
    "matmul": ("self", "other"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


@dataclass(frozen=True, slots=True)
class Equation:
    """The nodes that are multiplied, their letters, and those of what they give."""

    nodes: tuple[fx.Node, fx.Node]
    letters: tuple[str, str]
    out: str

    @property
    def sizes(self) -> dict[str, int]:
        """Of every letter, at a batch of 1."""
        sizes: dict[str, int] = {}
        for node, letters in zip(self.nodes, self.letters, strict=True):
            for letter, size in zip(letters, sizes_at_one(node), strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1))
        return sizes


def equation_of(node: fx.Node) -> Equation | None:
    """Of linear, matmul and its like, and einsum of two tensors; None of all else, and where an axis of one factor
    alone is summed over or a letter stands twice in one.
    """
    op, arguments = operation(node), call_of(node, {}).arguments
    if op == "einsum":
        return _of_einsum(node, str(arguments["equation"]).replace(" ", ""), list(arguments["tensors"]))
    if op not in _FACTORS:
        return None
    one, other = (arguments[name] for name in _FACTORS[op])
    ranks = len(sizes_at_one(one)), len(sizes_at_one(other))
    front = FRONT[: max(ranks) - 2]
    if min(ranks) < 2 and op != "linear":
        return None
    if op == "linear":
        front = FRONT[: ranks[0] - 1]
        return Equation((one, other), (f"{front}K", "NK"), f"{front}N")
    ends = [front[len(front) - rank + 2 :] for rank in ranks]
    return Equation((one, other), (f"{ends[0]}MK", f"{ends[1]}KN"), f"{front}MN")


def _of_einsum(node: fx.Node, equation: str, nodes: list[Any]) -> Equation | None:
    """Dots stand for axes that both may have, the last of them for the last."""
    terms, arrow, out = equation.partition("->")
    if len(nodes) != 2 or not arrow:
        return None
    free = [letter for letter in FREE if letter not in equation]

    def spelled(term: str, of: fx.Node) -> str:
        count = len(sizes_at_one(of)) - len(term.replace("...", ""))
        return term.replace("...", "".join(free[:count][::-1]))

    one, other = (spelled(term, each) for term, each in zip(terms.split(","), nodes, strict=True))
    out = spelled(out, node)
    is_twice = any(len(set(term)) < len(term) for term in (one, other))
    if is_twice or (set(one) ^ set(other)) - set(out):
        return None
    return Equation((nodes[0], nodes[1]), (one, other), out)
