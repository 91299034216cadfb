"""What torch's exporter to ONNX can't write, or writes so that the graph won't do, said otherwise."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from onnxscript import opset20
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class FourAxes(TorchFunctionMode):
    """While it is entered, attention over any axes in front of tokens is one over a batch and heads: the exporter takes
    no other.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
            return _of_four_axes(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _of_four_axes(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *more: Any,
    **options: Any,
) -> Tensor:
    if query.dim() == 4:
        return attention(query, key, value, attn_mask, *more, **options)
    if attn_mask is not None and attn_mask.dim() == 3 == query.dim():
        attn_mask = attn_mask.unsqueeze(1)
    elif attn_mask is not None and attn_mask.dim() > 3:
        attn_mask = _four(attn_mask.expand(*query.shape[:-2], *attn_mask.shape[-2:]))
    output = attention(_four(query), _four(key), _four(value), attn_mask, *more, **options)
    return output.reshape(*query.shape[:-1], value.shape[-1])


def _four(x: Tensor) -> Tensor:
    """One head of each in a batch, or the heads of all that stand in front of them."""
    return x.unsqueeze(1) if x.dim() == 3 else x.reshape(-1, *x.shape[-3:])


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    """Between numbers that the model holds: Max and Min, which are written otherwise, onnxscript makes one Clip of by
    bounds that lose their names where one tensor is clamped twice.
    """
    bounds = [None if each is None else opset20.CastLike(each, self) for each in (min, max)]
    if all(each is None or len(each.shape) == 0 for each in (min, max)):
        return opset20.Clip(self, *bounds)
    for bound, operator in zip(bounds, (opset20.Max, opset20.Min), strict=True):
        self = self if bound is None else operator(self, bound)
    return self


OWN: Mapping[Any, Callable[..., Any]] = MappingProxyType({torch.ops.aten.clamp.Tensor: _clamp})
"""By torch's operator what is written of it."""
