"""Products of activations, however they are spelled: matmul, einsum, scaled_dot_product_attention."""

from dataclasses import replace

from .call import Call, Part, Value
from .flow import Flow
from .labels import varying
from .marks import Marks, marked
from .mixing import mixed
from .moves import stopped
from .product import Factor, factor, product

_FRONT = "abcdefghijklmn"


def matmul(flow: Flow, call: Call) -> Value:
    """matmul, mm, bmm: [..., M, K] and [..., K, N], batches spread out."""
    names = ("self", "mat2" if "mat2" in call.arguments else "other")
    ranks = [len(call[name].shape) for name in names]
    if min(ranks) < 2:
        return stopped(flow, call)
    front = _FRONT[: max(ranks) - 2]
    ends = [front[len(front) - rank + 2 :] for rank in ranks]
    one, other = factor(call, names[0], f"{ends[0]}MK"), factor(call, names[1], f"{ends[1]}KN")
    return product(flow, call, one, other, f"{front}MN")


def addmm(flow: Flow, call: Call) -> Value:
    """addmm, baddbmm: self + one @ other, the first a bias where it is a constant of one axis."""
    names, front = (("batch1", "batch2"), "a") if "batch1" in call.arguments else (("mat1", "mat2"), "")
    one, other = factor(call, names[0], f"{front}MK"), factor(call, names[1], f"{front}KN")
    given, bias = product(flow, call, one, other, f"{front}MN"), call["self"]
    flow.stay(bias.labels, f"{call.where} adds it")
    missing = len(given.shape) - len(bias.shape)
    met = [dim for dim in given.dims if dim >= missing and bias.shape[dim - missing] > 1]
    if bias.constant and given.dims == (len(given.shape) - 1,) and len(bias.shape) == 1:
        flow.touch(call.node, bias.constant, (0,), flow.across(given, given.dims, call.where), "writes")
    elif met:
        flow.stay(given.labels, f"{call.where} adds what can't be narrowed")
    return given


def einsum(flow: Flow, call: Call) -> Value:
    """Of two factors; dots stand for axes that both may have."""
    equation, nodes = str(call.arguments["equation"]).replace(" ", ""), list(call.arguments["tensors"])
    terms, arrow, out = equation.partition("->")
    if len(nodes) != 2 or not arrow:
        return stopped(flow, call)
    free = [letter for letter in _FRONT + "opqrstuvwxyz" if letter not in equation]
    spelled = [
        _spelled(term, len(call.values[node].shape), free) for term, node in zip(terms.split(","), nodes, strict=True)
    ]
    out = _spelled(out, len(call.shape), free)
    alone = set(spelled[0]) ^ set(spelled[1])
    if alone - set(out) or any(len(set(term)) < len(term) for term in spelled):
        return stopped(flow, call)
    one, other = (
        Factor(node=node, marks=call.values[node], letters=term) for node, term in zip(nodes, spelled, strict=True)
    )
    return product(flow, call, one, other, out)


def _spelled(term: str, rank: int, free: list[str]) -> str:
    """With letters for dots, the last of them for the last axis."""
    count = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(free[:count][::-1]))


def attention(flow: Flow, call: Call) -> Value:
    """queries [..., H, L, E], keys [..., H, S, E], values [..., H, S, V]; of grouped queries several share a key."""
    queries, keys, values = (call.node_of(name) for name in ("query", "key", "value"))
    assert queries is not None and keys is not None and values is not None, call.node  # noqa: PT018
    query, key, value = (call.values[node] for node in (queries, keys, values))
    times = query.shape[-3] // key.shape[-3] if call["enable_gqa"] else 1
    key, value = _repeated(key, times), _repeated(value, times)
    front = _FRONT[: len(query.shape) - 2]
    part = Part(call.node, call.values, call.arguments, (*call.shape[:-1], key.shape[-2]))
    one, other = (
        Factor(node=queries, marks=query, letters=f"{front}LE"),
        Factor(node=keys, marks=key, letters=f"{front}SE"),
    )
    scores = mixed(flow, part, _masked(flow, part, product(flow, part, one, other, f"{front}LS")), (-1,))
    if times > 1 and flow.heard and flow.heard[-1].source is keys:
        flow.heard[-1] = replace(flow.heard[-1], labels=flow.heard[-1].labels[..., ::times, :])
    weights = Factor(node=call.node, marks=scores, letters=f"{front}LS")
    return product(flow, call, weights, Factor(node=values, marks=value, letters=f"{front}SV"), f"{front}LV")


def _repeated(marks: Marks, times: int) -> Marks:
    """As many heads as there are of queries."""
    if times == 1:
        return marks
    shape = (*marks.shape[:-3], marks.shape[-3] * times, *marks.shape[-2:])
    return replace(marks, shape=shape) if marks.labels is None else marked(marks.labels.repeat_interleave(times, -3))


def _masked(flow: Flow, call: Call, scores: Marks) -> Value:
    """A mask or bias that is a constant goes along with the heads; any other is one with them, or holds them up."""
    mask = call["attn_mask"]
    if not isinstance(mask, Marks):
        return scores
    missing = len(scores.shape) - len(mask.shape)
    met = tuple(dim for dim in scores.dims if dim >= missing and mask.shape[dim - missing] > 1)
    if met and mask.constant:
        heads = flow.across(scores, met, call.where)
        flow.touch(call.node, mask.constant, tuple(dim - missing for dim in met), heads, "between")
    elif met and mask.labels is not None and tuple(dim + missing for dim in varying(mask.labels)) == scores.dims:
        assert scores.labels is not None
        flow.join(scores.labels, mask.labels, f"{call.where} adds what stays")
    elif met or mask.labels is not None:
        flow.stay(scores.labels, f"{call.where} adds what can't be narrowed")
        flow.stay(mask.labels, f"{call.where} adds it to heads")
    return scores
