"""Rules of products of two tensors, with a letter for each axis as in einsum: `abK,NK->abN` for a linear layer.

Labels end along letters that are summed over. A weight's columns read and its rows write; the elements of two
activations that are multiplied are joined. Letters of both factors and the result are batches, as heads are.
"""

import math
import string
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from corp_deploy.traced.programs.program import named_arguments, operation, sizes_at_one

from .flow import Call, Flow, Value
from .labels import LabelTensor, first_along, label_tensor, place_along
from .moves import unlabelled

FRONT = "abcdefghijklmn"
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
    """Two nodes that are multiplied, with the letters of their axes and of the result's."""

    nodes: tuple[fx.Node, fx.Node]
    letters: tuple[str, str]
    out: str

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter at a batch of 1."""
        sizes: dict[str, int] = {}
        for node, letters in zip(self.nodes, self.letters, strict=True):
            for letter, size in zip(letters, sizes_at_one(node), strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1))
        return sizes


def equation_of(node: fx.Node) -> Equation | None:
    """Return the equation of a linear layer, matmul or einsum of two tensors; None for any other node.

    None also for a matmul of vectors, or if einsum sums over an axis of one factor or has a letter twice in one.
    """
    op, arguments = operation(node), named_arguments(node)
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
    """Read einsum's equation; dots stand for axes that both factors may have, aligned at the last."""
    terms, arrow, out = equation.partition("->")
    if len(nodes) != 2 or not arrow:
        return None
    free = [letter for letter in string.ascii_lowercase if letter not in equation]

    def spelled(term: str, of: fx.Node) -> str:
        count = len(sizes_at_one(of)) - len(term.replace("...", ""))
        return term.replace("...", "".join(free[:count][::-1]))

    one, other = (spelled(term, each) for term, each in zip(terms.split(","), nodes, strict=True))
    out = spelled(out, node)
    is_twice = any(len(set(term)) < len(term) for term in (one, other))
    if is_twice or (set(one) ^ set(other)) - set(out):
        return None
    return Equation((nodes[0], nodes[1]), (one, other), out)


def count_node_macs(node: fx.Node) -> int:
    """Return the multiply-adds of a product, layer, convolution or attention for one input; 0 for other nodes."""
    op = operation(node)
    if op.startswith("conv") and op[-1] == "d":
        arguments = named_arguments(node)
        places = arguments["input"] if "transpose" in op else node
        return int(math.prod(sizes_at_one(places)) * math.prod(sizes_at_one(arguments["weight"])[1:]))
    if op == "scaled_dot_product_attention":
        query, key, value = (sizes_at_one(each) for each in node.args[:3])  # type: ignore[arg-type]
        return int(math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    equation = equation_of(node)
    return 0 if equation is None else math.prod(equation.sizes.values())


def is_contraction(node: fx.Node) -> bool:
    """Check whether a node sums products, or did before a site beside it was narrowed to nothing."""
    return operation(node) == "linear" or count_node_macs(node) > 0 or 0 in (sizes_at_one(node) or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A tensor that is multiplied, with a letter for each axis."""

    node: fx.Node
    marks: LabelTensor
    letters: str

    @property
    def varying(self) -> str:
        """The letters that the labels vary along."""
        return "".join(self.letters[dim] for dim in self.marks.dims)

    def size(self, letter: str) -> int:
        return self.marks.shape[self.letters.index(letter)]

    def axes(self, letters: str) -> tuple[int, ...]:
        return tuple(self.letters.index(letter) for letter in letters)

    def at(self, letters: str) -> Tensor:
        """Return the labels [the sizes of letters] at index 0 of all other axes."""
        assert self.marks.labels is not None, self
        return first_along(self.marks.labels, self.axes(letters))


def argument_factor(call: Call, name: str, letters: str) -> Factor:
    return Factor(node=call.arguments[name], marks=call[name], letters=letters)


def rename_broadcast_letters(one: Factor, other: Factor) -> Factor:
    """Return the factor `one` with new letters for its axes of size 1 that are broadcast along those of `other`."""
    odd = {
        letter: chr(ord("Α") + place)
        for place, letter in enumerate(one.letters)
        if letter in other.letters and one.size(letter) == 1 < other.size(letter)
    }
    return replace(one, letters="".join(odd.get(letter, letter) for letter in one.letters))


def multiply(flow: Flow, call: Call, one: Factor, other: Factor, out: str) -> Value:
    """Apply the rule of a product of two factors, summed over letters not in `out`, and return the result's labels."""
    one, other = rename_broadcast_letters(one, other), rename_broadcast_letters(other, one)
    if other.marks.constant and not one.marks.constant:
        return _weighted(flow, call, one, other, out)
    if one.marks.constant and not other.marks.constant:
        return _weighted(flow, call, other, one, out)
    summed = set(_common(one, other, out)[1])
    if set(one.varying) & summed and set(other.varying) & summed:
        return _bilinear(flow, call, one, other, out)
    one, other = _unsummed(flow, call, one, other, summed), _unsummed(flow, call, other, one, summed)
    return _weighing(flow, call, one, other, out)


def _common(one: Factor, other: Factor, out: str) -> tuple[str, str]:
    both = [letter for letter in one.letters if letter in other.letters]
    return "".join(each for each in both if each in out), "".join(each for each in both if each not in out)


def _weighted(flow: Flow, call: Call, one: Factor, weight: Factor, out: str) -> Value:
    batch, summed = _common(one, weight, out)
    written = "".join(letter for letter in weight.letters if letter not in one.letters and letter in out)
    if set(one.varying) & set(summed):
        # The weight's columns are joined with the labels that they are multiplied with.
        why, read = f"{call.where} reads it together with elements that stay", batch + summed
        axes = weight.axes(read)
        columns = flow.across(one.marks, one.axes(read), why)
        ids = flow.axis(weight.marks.constant, axes, columns.shape)
        flow.join(ids, columns, why)
        flow.use(call.node, weight.marks.constant, axes, ids, "reads")
        flow.use(call.node, one.node.name, one.axes(read), ids, "sums")
    else:
        keep_columns(flow, weight, summed, one.marks.why)
        if one.marks.labels is not None:
            return _through(one, call.shape, out)
    if not written:
        return unlabelled(call.shape, f"it comes from {call.where}")
    if set(batch) - set(one.varying):  # tables of relative positions have such batches
        return unlabelled(call.shape, f"{call.where} has rows for each place")
    letters = "".join(letter for letter in weight.letters if letter in batch + written)
    return _placed(write_rows(flow, call, weight, letters), letters, call.shape, out)


def write_rows(flow: Flow, call: Call, weight: Factor, letters: str) -> Tensor:
    """Note that a node writes a weight's rows, and return their labels [the sizes of letters]."""
    axes = weight.axes(letters)
    ids = flow.axis(weight.marks.constant, axes, [weight.size(letter) for letter in letters])
    flow.use(call.node, weight.marks.constant, axes, ids, "writes")
    return ids


def keep_columns(flow: Flow, weight: Factor, letters: str, why: str) -> None:
    """Let the labels of a weight's axes `letters`, whose input has no labels, stay if the weight is used twice."""
    if flow.times_used[weight.marks.constant] > 1:
        for letter in letters:
            ids = flow.axis(weight.marks.constant, weight.axes(letter), (weight.size(letter),))
            flow.stay(ids, why or "it is used twice")


def _placed(ids: Tensor, letters: str, shape: tuple[int, ...], out: str) -> LabelTensor:
    return label_tensor(place_along(ids, [out.index(letter) for letter in letters], len(out)).expand(shape))


def _through(one: Factor, shape: tuple[int, ...], out: str) -> LabelTensor:
    letters = "".join(letter for letter in one.letters if letter in out)
    return _placed(one.at(letters), letters, shape, out)


def _bilinear(flow: Flow, call: Call, one: Factor, other: Factor, out: str) -> Value:
    """Join each element of queries with its element of keys.

    The result has a label for each head, which holds the labels that are summed over in the head.
    """
    (batch, summed), why = _common(one, other, out), f"{call.where} multiplies it with elements that stay"
    letters = batch + summed
    labels, beside = (flow.across(each.marks, each.axes(letters), why) for each in (one, other))
    flow.join(labels, beside, why)
    for each in (one, other):
        flow.use(call.node, each.node.name, each.axes(letters), labels, "pairs")
    heads = "".join(letter for letter in batch if letter in one.varying + other.varying)
    if not heads:
        return unlabelled(call.shape, f"it comes from {call.where}")
    outer = flow.fresh([one.size(letter) for letter in heads])
    flow.hold(outer.reshape([one.size(letter) if letter in heads else 1 for letter in letters]), labels)
    return _placed(outer, heads, call.shape, out)


def _unsummed(flow: Flow, call: Call, each: Factor, beside: Factor, summed: set[str]) -> Factor:
    if not set(each.varying) & summed:
        return each
    why = call.because("multiplies it with", beside.marks)
    flow.stay(each.marks.labels, why)
    return replace(each, marks=LabelTensor(each.marks.shape, None, why))


def _weighing(flow: Flow, call: Call, one: Factor, other: Factor, out: str) -> Value:
    """Apply the rule of attention weights times values, summed over axes without labels; return the finer labels."""
    batch = set(_common(one, other, out)[0])
    fine, coarse = (other, one) if not set(one.varying) - batch and other.varying else (one, other)
    if fine.marks.labels is None:
        return unlabelled(call.shape, one.marks.why or other.marks.why or f"it comes from {call.where}")
    own = "".join(letter for letter in fine.varying if letter not in batch)
    heads = "".join(letter for letter in fine.letters if letter in batch and letter in fine.varying + coarse.varying)
    why = call.because("multiplies it with", coarse.marks)
    crosses = set(coarse.varying) - batch
    if crosses:
        flow.stay(coarse.marks.labels, f"{call.where} crosses two axes")
    if coarse.marks.labels is None and not own:
        flow.stay(fine.marks.labels, why)
    elif coarse.marks.labels is None or crosses:
        flow.guard(fine.at(heads + own), len(heads), why)
    elif own:
        outer = coarse.at(heads)
        flow.hold(outer.reshape(*outer.shape, *[1] * len(own)), fine.at(heads + own))
    else:
        flow.join(coarse.at(heads), fine.at(heads), why)
    flow.summed.append(fine.at(heads + own))
    return _through(fine, call.shape, out)
