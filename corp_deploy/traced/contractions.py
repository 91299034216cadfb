"""Contractions: what is summed over ends there. A weight's columns read, its rows write; of two activations the
elements that are multiplied are one.

A product is said by letters, one an axis, as einsum does; letters of the result alone are written, those of both
factors and not of the result are summed over, those of both factors and the result are batches (as heads are).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from .call import Call
from .flow import Flow, Hearing
from .labels import varying
from .marks import Marks, marked
from .mixing import mixed
from .moves import fixed, stopped

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KERNEL = "XYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A tensor that is multiplied, its axes by letters."""

    node: fx.Node
    marks: Marks
    letters: str

    @property
    def varying(self) -> str:
        """The letters that its labels vary along."""
        return "".join(self.letters[dim] for dim in self.marks.dims)

    def size(self, letter: str) -> int:
        return self.marks.shape[self.letters.index(letter)]

    def across(self, flow: Flow, letters: str, why: str) -> Tensor:
        """Its labels [the sizes of letters], joined over all other axes."""
        return flow.across(self.marks, [self.letters.index(letter) for letter in letters], why)


def product(flow: Flow, call: Call, one: Factor, other: Factor, out: str) -> Any:
    """One times the other, summed over the letters that `out` lacks."""
    if other.marks.constant and not one.marks.constant:
        return _weighted(flow, call, one, other, out)
    if one.marks.constant and not other.marks.constant:
        return _weighted(flow, call, other, one, out)
    summed = set(_summed(one, other, out))
    if set(one.varying) & summed and set(other.varying) & summed:
        return _bilinear(flow, call, one, other, out)
    return _weighing(flow, call, _unsummed(flow, call, one, other, summed), _unsummed(flow, call, other, one, summed), out)


def _unsummed(flow: Flow, call: Call, each: Factor, beside: Factor, summed: set[str]) -> Factor:
    """A side with labels along what is summed over stays when the other side has none there."""
    if not set(each.varying) & summed:
        return each
    why = f"{call.where} multiplies it with what can't be narrowed: {beside.marks.why}"
    flow.stay(each.marks.labels, why)
    return replace(each, marks=Marks(each.marks.shape, None, why))


def _summed(one: Factor, other: Factor, out: str) -> str:
    return "".join(letter for letter in one.letters if letter in other.letters and letter not in out)


def _weighted(flow: Flow, call: Call, one: Factor, weight: Factor, out: str) -> Any:
    """A linear map with a parameter: it reads what is summed over and writes its own letters."""
    summed = _summed(one, weight, out)
    batch = "".join(letter for letter in weight.letters if letter in one.letters and letter in out)
    written = "".join(letter for letter in weight.letters if letter not in one.letters and letter in out)
    reads = bool(set(one.varying) & set(summed))
    if reads:
        read_letters = "".join(letter for letter in batch + summed if letter in weight.letters)
        columns = one.across(flow, read_letters, f"{call.where} reads it together with what stays")
        read(flow, call, one, weight, read_letters, columns)
    else:
        _all_stays(flow, weight, summed, one.marks.why)
        if one.marks.labels is not None:
            return _through(one, call.shape, out)
    if not written:
        return fixed(call.shape, f"it comes from {call.where}")
    shared = "".join(letter for letter in batch if weight.size(letter) > 1)
    letters = "".join(letter for letter in weight.letters if letter in shared + written)
    return _placed(write(flow, call, weight, letters), letters, call.shape, out)


def read(flow: Flow, call: Call, one: Factor, weight: Factor, letters: str, columns: Tensor) -> None:
    """The weight's columns are the labels that they are multiplied with."""
    axes = tuple(weight.letters.index(letter) for letter in letters)
    ids = flow.axis(weight.marks.constant, axes, columns.shape)
    flow.join(ids, columns, f"{call.where} reads it together with what stays")
    flow.touch(call.node, weight.marks.constant, axes, ids, "reads")
    places = tuple(one.letters.index(letter) for letter in letters)
    flow.heard.append(Hearing(reader=call.node, source=one.node, axes=places, labels=ids, is_bilinear=False))


def write(flow: Flow, call: Call, weight: Factor, letters: str) -> Tensor:
    """The labels [the sizes of letters] of the weight's rows."""
    axes = tuple(weight.letters.index(letter) for letter in letters)
    ids = flow.axis(weight.marks.constant, axes, [weight.size(letter) for letter in letters])
    flow.touch(call.node, weight.marks.constant, axes, ids, "writes")
    return ids


def _all_stays(flow: Flow, weight: Factor, letters: str, why: str) -> None:
    """Columns that meet what is fixed, where the weight is used elsewhere too."""
    if flow.uses[weight.marks.constant] > 1:
        for letter in letters:
            axis = weight.letters.index(letter)
            flow.stay(flow.axis(weight.marks.constant, (axis,), (weight.size(letter),)), why or "it is used twice")


def _placed(ids: Tensor, letters: str, shape: Any, out: str) -> Marks:
    """Labels [the sizes of letters] as those of a result."""
    order = sorted(range(len(letters)), key=lambda place: out.index(letters[place]))
    sizes = [1] * len(out)
    for place in order:
        sizes[out.index(letters[place])] = ids.shape[place]
    return marked(ids.permute(order).reshape(sizes).expand(shape))


def _through(one: Factor, shape: Any, out: str) -> Marks:
    """What goes on along letters that aren't summed over."""
    assert one.marks.labels is not None
    labels, letters = one.marks.labels, one.letters
    for dim in reversed(range(labels.dim())):
        if letters[dim] not in out:
            labels, letters = labels.select(dim, 0), letters[:dim] + letters[dim + 1 :]
    return _placed(labels, letters, shape, out)


def _bilinear(flow: Flow, call: Call, one: Factor, other: Factor, out: str) -> Any:
    """Queries times keys: each element of one with its element of the other. The result has a label for each batch,
    that holds those of what was summed up in it.
    """
    batch = "".join(letter for letter in one.letters if letter in other.letters and letter in out)
    letters = batch + _summed(one, other, out)
    why = f"{call.where} multiplies it with what stays"
    both = [each.across(flow, letters, why) for each in (one, other)]
    flow.join(*both, why)
    for each in (one, other):
        axes = tuple(each.letters.index(letter) for letter in letters)
        flow.heard.append(Hearing(reader=call.node, source=each.node, axes=axes, labels=both[0], is_bilinear=True))
    heads = "".join(letter for letter in batch if letter in one.varying + other.varying)
    if not heads:
        return fixed(call.shape, f"it comes from {call.where}")
    outer = flow.fresh([one.size(letter) for letter in heads])
    flow.hold(outer.reshape([one.size(letter) if letter in heads else 1 for letter in letters]), both[0])
    return _placed(outer, heads, call.shape, out)


def _weighing(flow: Flow, call: Call, one: Factor, other: Factor, out: str) -> Any:
    """Attention times values: sums over what isn't labelled, so that labels of either side go on."""
    coarse, fine = sorted((one, other), key=lambda each: bool(set(each.varying) - set(_batch(one, other, out))))
    if fine.marks.labels is None:
        fine, coarse = coarse, fine
    if fine.marks.labels is None:
        return fixed(call.shape, one.marks.why or other.marks.why or f"it comes from {call.where}")
    batch = _batch(one, other, out)
    if set(coarse.varying) - set(batch):
        coarse, fine = other, one
        flow.stay(coarse.marks.labels, f"{call.where} crosses two axes")
        _guard(flow, call, fine, batch)
    elif coarse.marks.labels is not None:
        letters = "".join(letter for letter in batch if letter in coarse.varying + fine.varying)
        sides = [_at(each, letters + extra) for each, extra in ((coarse, ""), (fine, _own(fine, batch)))]
        outer = sides[0].reshape([*sides[0].shape, *[1] * (sides[1].dim() - sides[0].dim())])
        relate = flow.hold if set(fine.varying) - set(coarse.varying) else _joined(flow, call)
        relate(outer, sides[1])
    elif not set(fine.varying) - set(batch):
        flow.stay(fine.marks.labels, f"{call.where} multiplies it with what can't be narrowed: {coarse.marks.why}")
    else:
        _guard(flow, call, fine, batch)
    assert fine.marks.labels is not None
    flow.summed.append(fine.marks.labels)
    return _through(fine, call.shape, out)


def _guard(flow: Flow, call: Call, fine: Factor, batch: str) -> None:
    """Of what is multiplied with a side that can't be narrowed, something is left in each batch."""
    letters = "".join(letter for letter in batch if letter in fine.varying)
    if letters:
        labels = _at(fine, letters + _own(fine, batch))
        flow.guard(labels, len(letters), f"{call.where} multiplies it with what can't be narrowed")


def _batch(one: Factor, other: Factor, out: str) -> str:
    return "".join(letter for letter in one.letters if letter in other.letters and letter in out)


def _own(fine: Factor, batch: str) -> str:
    return "".join(letter for letter in fine.varying if letter not in batch)


def _at(each: Factor, letters: str) -> Tensor:
    """Its labels [the sizes of letters], the first along all others."""
    assert each.marks.labels is not None
    labels = each.marks.labels
    for dim in range(labels.dim()):
        if each.letters[dim] not in letters:
            labels = labels.narrow(dim, 0, 1)
    rest = [dim for dim in range(labels.dim()) if each.letters[dim] not in letters]
    dims = [each.letters.index(letter) for letter in letters]
    return labels.permute([*dims, *rest]).reshape([labels.shape[dim] for dim in dims])


def _joined(flow: Flow, call: Call) -> Any:
    return lambda one, other: flow.join(one, other, f"{call.where} multiplies it with what stays")


def factor(call: Call, name: str, letters: str) -> Factor:
    node = call.node_of(name)
    assert node is not None, (call.node, name)
    return Factor(node=node, marks=call.values[node], letters=letters)


def biased(flow: Flow, call: Call, given: Any, dim: int) -> Any:
    """A bias goes with the rows."""
    bias = call["bias"]
    if isinstance(bias, Marks) and given.labels is not None and dim % len(given.shape) in given.dims:
        rows = flow.across(given, (dim % len(given.shape),), f"{call.where} adds a bias")
        if bias.constant:
            flow.touch(call.node, bias.constant, (0,), rows, "writes")
        elif bias.labels is None:
            flow.stay(rows, f"{call.where} adds a computed bias")
        else:
            flow.join(rows, bias.labels, f"{call.where} adds a bias that stays")
    return given


def linear(flow: Flow, call: Call) -> Any:
    """input [..., K], weight [N, K]"""
    rank = len(call["input"].shape)
    front = _LETTERS[: rank - 1]
    if not call["weight"].constant:
        return _of_activations(flow, call, front)
    given = product(flow, call, factor(call, "input", front + "K"), factor(call, "weight", "NK"), front + "N")
    return biased(flow, call, given, -1)


def _of_activations(flow: Flow, call: Call, front: str) -> Any:
    """Weights that the model computes from its inputs."""
    return stopped(flow, call)


def matmul(flow: Flow, call: Call) -> Any:
    """matmul, mm, bmm: [..., M, K] and [..., K, N], with batches spread out."""
    names = ("self", "mat2" if "mat2" in call.arguments else "other")
    ranks = [len(call[name].shape) for name in names]
    if min(ranks) < 2:
        return stopped(flow, call)
    front = _LETTERS[: max(ranks) - 2]
    letters = [front[len(front) - rank + 2 :] + end for rank, end in zip(ranks, ("MK", "KN"), strict=True)]
    return spread_product(flow, call, names, letters, front + "MN")


def spread_product(flow: Flow, call: Call, names: tuple[str, str], letters: list[str], out: str) -> Any:
    """Axes of size 1 are spread out to those of the other side: they are letters of their own."""
    one, other = (factor(call, name, each) for name, each in zip(names, letters, strict=True))
    odd = [letter for letter in one.letters if letter in other.letters and one.size(letter) != other.size(letter)]
    sides = []
    for each, beside in ((one, other), (other, one)):
        renamed = "".join(
            letter.translate({ord(letter): ord("Γ") + odd.index(letter)}) if letter in odd and each.size(letter) == 1 else letter
            for letter in each.letters
        )
        sides.append(Factor(node=each.node, marks=each.marks, letters=renamed))
        assert beside is not each
    return product(flow, call, sides[0], sides[1], out)


def addmm(flow: Flow, call: Call) -> Any:
    """self + mat1 @ mat2, the first a bias."""
    names, rank = (("batch1", "batch2"), 3) if "batch1" in call.arguments else (("mat1", "mat2"), 2)
    front = _LETTERS[: rank - 2]
    given = product(flow, call, factor(call, names[0], front + "MK"), factor(call, names[1], front + "KN"), front + "MN")
    bias = call["self"]
    if given.labels is None:
        flow.stay(bias.labels, f"{call.where} adds it to what stays")
    elif bias.constant and len(bias.shape) == 1 and given.dims == (len(given.shape) - 1,):
        flow.touch(call.node, bias.constant, (0,), flow.across(given, given.dims, call.where), "writes")
    elif any(bias.shape[dim - len(given.shape)] > 1 for dim in given.dims if len(given.shape) - dim <= len(bias.shape)):
        flow.stay(given.labels, f"{call.where} adds what can't be narrowed")
    return given


def einsum(flow: Flow, call: Call) -> Any:
    """Of two factors; dots stand for axes that both have."""
    equation, tensors = str(call.arguments["equation"]).replace(" ", ""), list(call.arguments["tensors"])
    front, arrow, out = equation.partition("->")
    terms = front.split(",")
    if len(tensors) != 2 or not arrow:
        return stopped(flow, call)
    ranks = [len(call.values[node].shape) for node in tensors]
    dots = max(rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True))
    free = [letter for letter in _LETTERS if letter not in equation][: max(dots, 0)]
    spelled = []
    for rank, term in zip(ranks, terms, strict=True):
        own = rank - len(term.replace("...", ""))
        spelled.append(term.replace("...", "".join(free[len(free) - own :])))
    out = out.replace("...", "".join(free))
    if any(len(set(term)) < len(term) for term in spelled):
        return stopped(flow, call)
    one, other = (
        Factor(node=node, marks=call.values[node], letters=term) for node, term in zip(tensors, spelled, strict=True)
    )
    alone = [letter for each, beside in ((one, other), (other, one)) for letter in each.letters if letter not in beside.letters + out]
    return stopped(flow, call) if alone else product(flow, call, one, other, out)


def attention(flow: Flow, call: Call) -> Any:
    """queries [..., H, L, E], keys [..., H, S, E], values [..., H, S, V]; of grouped queries several share a key."""
    query, key, value = (factor(call, name, "") for name in ("query", "key", "value"))
    ratio = query.marks.shape[-3] // key.marks.shape[-3] if call["enable_gqa"] and len(query.marks.shape) > 2 else 1
    front = _LETTERS[: len(query.marks.shape) - 2]
    key, value = (_repeated(flow, call, each, ratio) for each in (key, value))
    query, key, value = (
        Factor(node=each.node, marks=each.marks, letters=front[len(front) - len(each.marks.shape) + 2 :] + ends)
        for each, ends in ((query, "LE"), (key, "SE"), (value, "SV"))
    )
    scores_shape = (*call.shape[:-1], key.marks.shape[-2])
    scores = product(flow, _Shaped(call, scores_shape), query, key, front + "LS")
    scores = _masked(flow, call, scores)
    scores = mixed(flow, _Shaped(call, scores_shape), scores, (-1,))
    between = Factor(node=call.node, marks=scores, letters=front + "LS")
    return product(flow, call, between, value, front + "LV")


class _Shaped(Call):
    """A call of which a part is looked at, of another shape."""

    __slots__ = ("_shape",)

    def __init__(self, call: Call, shape: tuple[int, ...]) -> None:
        super().__init__(call.node, call.values, call.arguments)
        object.__setattr__(self, "_shape", shape)

    @property
    def shape(self) -> Any:
        return self._shape


def _repeated(flow: Flow, call: Call, each: Factor, ratio: int) -> Factor:
    if ratio == 1 or each.marks.labels is None:
        shape = list(each.marks.shape)
        if ratio > 1:
            shape[-3] *= ratio
        marks = Marks(tuple(shape), each.marks.labels, each.marks.why)
    else:
        marks = marked(each.marks.labels.repeat_interleave(ratio, -3), each.marks.why)
    return Factor(node=each.node, marks=marks, letters="")


def _masked(flow: Flow, call: Call, scores: Marks) -> Marks:
    """A mask or bias that is spread over heads, or a constant, goes along; any other holds the heads."""
    mask = call["attn_mask"]
    if not isinstance(mask, Marks):
        return scores
    missing = len(scores.shape) - len(mask.shape)
    if mask.constant:
        if scores.labels is not None and (dims := [dim for dim in scores.dims if dim >= missing and mask.shape[dim - missing] > 1]):
            heads = flow.across(scores, dims, f"{call.where} adds it to all heads")
            flow.touch(call.node, mask.constant, tuple(dim - missing for dim in dims), heads, "between")
        return scores
    labels = None if mask.labels is None else mask.labels.reshape((1,) * missing + mask.shape)
    sizes = (1,) * missing + mask.shape
    if scores.labels is None:
        flow.stay(labels, f"{call.where} adds it to what stays")
    elif labels is not None and varying(labels) == scores.dims:
        flow.join(scores.labels, labels, f"{call.where} adds what stays")
    elif any(sizes[dim] > 1 for dim in scores.dims):
        flow.stay(scores.labels, f"{call.where} adds what can't be narrowed")
        flow.stay(labels, f"{call.where} adds it to heads")
    return scores


def convolution(flow: Flow, call: Call) -> Any:
    """input [B, C, ...], weight [O, C / groups, ...]; a depthwise one takes its channels along."""
    groups = call["groups"]
    first, weight = call["input"], call["weight"]
    if not weight.constant or (first.dims and 1 not in first.dims) or len(first.shape) != len(weight.shape):
        return stopped(flow, call)
    spatial = _LETTERS[: len(first.shape) - 2]
    if groups > 1:
        return _grouped(flow, call, first, weight, groups)
    entering = factor(call, "input", "NC" + spatial)
    given = product(flow, call, entering, factor(call, "weight", "OC" + _KERNEL[: len(spatial)]), "NO" + spatial)
    return biased(flow, call, given, 1)


def _grouped(flow: Flow, call: Call, first: Marks, weight: Marks, groups: int) -> Any:
    """Each channel by itself, or several of them that go on as they come."""
    if groups != first.shape[1]:
        return _in_groups(flow, call, first, weight, groups)
    if first.labels is None:
        return fixed(call.shape, first.why)
    channels_C = flow.across(first, (1,), f"{call.where} convolves each channel")
    rows = channels_C.repeat_interleave(weight.shape[0] // groups)
    flow.touch(call.node, weight.constant, (0,), rows, "between")
    given = marked(rows.reshape(1, -1, *[1] * (len(first.shape) - 2)).expand(call.shape), first.why)
    return biased(flow, call, given, 1)


def _in_groups(flow: Flow, call: Call, first: Marks, weight: Marks, groups: int) -> Any:
    """Each group of rows [O / groups] has columns of its own [C / groups]; as many are left of each."""
    columns, why = weight.shape[1], f"{call.where} works in groups"
    if first.labels is not None:
        channels = flow.across(first, (1,), f"{call.where} reads it together with what stays").reshape(groups, columns)
        ids = flow.axis(weight.constant, (0, 1), (groups, columns))
        flow.join(ids, channels, f"{call.where} reads it together with what stays")
        of_rows = ids.unsqueeze(1).expand(groups, weight.shape[0] // groups, columns).reshape(-1, columns)
        flow.touch(call.node, weight.constant, (0, 1), of_rows, "reads")
        flow.guard(ids, 1, why)
        source = call.node_of("input")
        assert source is not None
        flow.heard.append(
            Hearing(reader=call.node, source=source, axes=(1,), labels=ids.reshape(-1), is_bilinear=False)
        )
    rows = write(flow, call, factor(call, "weight", "OC" + _KERNEL[: len(weight.shape) - 2]), "O")
    flow.guard(rows.reshape(groups, -1), 1, why)
    return biased(flow, call, marked(rows.reshape(1, -1, *[1] * (len(first.shape) - 2)).expand(call.shape)), 1)


def transposed_convolution(flow: Flow, call: Call) -> Any:
    """input [B, C, ...], weight [C, O, ...]"""
    first, weight = call["input"], call["weight"]
    if not weight.constant or set(first.dims) - {1} or call["groups"] != 1:
        return stopped(flow, call)
    spatial = _LETTERS[: len(first.shape) - 2]
    entering = factor(call, "input", "NC" + spatial)
    given = product(flow, call, entering, factor(call, "weight", "CO" + _KERNEL[: len(spatial)]), "NO" + spatial)
    return biased(flow, call, given, 1)


def embedding(flow: Flow, call: Call) -> Any:
    """weight [V, C]: columns of a table are written, its rows are read by number."""
    weight = factor(call, "weight", "VC")
    if not weight.marks.constant:
        return stopped(flow, call)
    _all_stays(flow, weight, "V", "a table is looked up by number")
    labels = write(flow, call, weight, "C")
    return marked(torch.broadcast_to(labels, call.shape))
