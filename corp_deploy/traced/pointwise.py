"""Element by element: labels that meet are one. And channel by channel: norms in eval, with a parameter an element."""

from itertools import combinations

from .call import Call, Value
from .flow import Flow
from .marks import Marks, marked
from .moves import fixed
from .names import named

UNARY = named(
    """
    abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min cos cosh deg2rad elu erf
    erfc erfinv exp exp2 expm1 floor frac full_like gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf
    isnan leaky_relu log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg ones_like positive
    reciprocal relu relu6 round rrelu rsqrt selu sgn sigmoid sign silu sin sinh softplus softshrink softsign
    special_erf sqrt square tan tanh tanhshrink zeros_like threshold trunc
    """
)
BINARY = named(
    """
    __and__ __or__ add addcdiv addcmul atan2 bitwise_and bitwise_or copysign div divide eq floor_divide fmax fmin
    fmod ge gt hypot le lerp logical_and logical_or logical_xor lt masked_fill maximum minimum mul multiply ne pow
    prelu remainder rsub sub subtract true_divide where xlogy
    """
)
POINTWISE = UNARY | BINARY | {f"{op}_" for op in UNARY | BINARY}
SUMS = named(
    """
    add add_ sub sub_ subtract rsub addcmul lerp
    """
)
PRODUCTS = named(
    """
    mul mul_ multiply div div_ divide
    """
)


def pointwise(flow: Flow, call: Call) -> Value:
    """Labels as they meet, with axes of size 1 spread out; constants go along with whatever they meet."""
    if call.op.startswith("prelu"):
        return _prelu(flow, call)
    spread = [_aligned(each, len(call.shape)) for each in call.tensors]
    labelled = [each for each in spread if each.labels is not None]
    if not labelled:
        return fixed(call.shape, next((each.why for each in spread if each.why), f"it comes from {call.where}"))
    moving = [each for each in spread if not each.constant]
    for one, other in combinations(moving, 2):
        _meet(flow, call, one, other)
    # Of labels that hold others, and of those along another axis, the finer and the first ones go on.
    first = max(labelled, key=lambda each: len(each.dims))
    assert first.labels is not None, call.node
    _along_constants(flow, call, first)
    return marked(first.labels.expand(call.shape), first.why)


def _along_constants(flow: Flow, call: Call, first: Marks) -> None:
    """Constants with an element for each label, as a bias or a layer scale has."""
    for node in call.node.all_input_nodes:
        marks = call.values[node]
        if isinstance(marks, Marks) and marks.constant:
            missing = len(call.shape) - len(marks.shape)
            axes = [dim - missing for dim in first.dims if dim >= missing and marks.shape[dim - missing] > 1]
            if len(axes) == len(first.dims):
                labels = flow.across(first, first.dims, f"{call.where} has an element for each")
                flow.touch(call.node, marks.constant, tuple(axes), labels, "between")


def _aligned(marks: Marks, rank: int) -> Marks:
    """With axes of size 1 in front."""
    missing = rank - len(marks.shape)
    shape = (1,) * missing + marks.shape
    labels = None if marks.labels is None else marks.labels.reshape(shape) if missing else marks.labels
    return Marks(shape, labels, marks.why, marks.constant)


def _meet(flow: Flow, call: Call, one: Marks, other: Marks) -> None:
    if len(one.dims) < len(other.dims):
        one, other = other, one
    if one.labels is None:
        return
    lacking = [dim for dim in one.dims if dim not in other.dims]
    is_spread = all(other.shape[dim] == 1 for dim in lacking)
    if other.labels is None:
        if not is_spread:
            flow.stay(one.labels, call.because("takes it together with", other))
        return
    beyond = [dim for dim in other.dims if dim not in one.dims]
    if beyond:
        flow.stay(other.labels, f"{call.where} crosses two axes")
        return
    if lacking and is_spread and one.dims[-1] in lacking:
        flow.hold(other.labels, one.labels)
        return
    flow.join(one.labels, other.labels, f"{call.where} takes it together with what stays")
    if call.op in SUMS:
        flow.added.append(one.labels)
    if call.op in PRODUCTS and one.shape == other.shape:
        flow.multiplied.append(one.labels)


def _prelu(flow: Flow, call: Call) -> Value:
    """Its slopes stand along the second axis."""
    return channelwise(flow, call, ("weight",))


def channelwise(flow: Flow, call: Call, parameters: tuple[str, ...]) -> Value:
    """Along the second axis, with these parameters by channel."""
    first = call["input"] if "input" in call.arguments else call["self"]
    if first.labels is None:
        return fixed(call.shape, first.why) if isinstance(call.shape, tuple) else first
    if 1 in first.dims:
        channels_C = flow.across(first, (1,), f"{call.where} has a parameter for each channel")
        for name in parameters:
            marks = call[name]
            if isinstance(marks, Marks) and marks.shape == tuple(channels_C.shape):
                if marks.constant:
                    flow.touch(call.node, marks.constant, (0,), channels_C, "between")
                else:
                    flow.stay(channels_C, f"{call.where} has computed parameters")
    return marked(first.labels, first.why)


def batch_norm(flow: Flow, call: Call) -> Value:
    """Of known means and variances."""
    return channelwise(flow, call, ("weight", "bias", "running_mean", "running_var"))
