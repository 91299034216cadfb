"""How a model is typed: a copy in float32, float16 or bfloat16, or mixed with float32, whose ports stay float32."""

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ground.errors import BadInput
from ground.precision import FLOAT32, MIXED, FloatType, Precision, mixed_with_float32, precision_by_name

from .pixels import PixelEntry

Norms = tuple[type[nn.Module], ...]
# What takes means of squares: in sixteen bits they overflow, or lose what the mean is made of.
NORMS: Norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)


def typed_copy(model: nn.Module, precision: str, keep_fp32: Sequence[str] = (), *, norms: Norms = NORMS) -> nn.Module:
    """Return a copy on the CPU in eval mode, typed as asked; floats at its ports stay float32.

    fp16 and bf16 hold everything in sixteen bits but modules of the types `norms` and what normalises pixels; mixed
    ones also leave modules that match `keep_fp32`. A module all of whose children are kept is kept, so `blocks.7.*`
    keeps its residual additions. Raises BadInput for an unknown precision, patterns that fit nothing, and weights
    beyond the type.
    """
    named = precision_by_name(precision)
    if named.mixed and not keep_fp32:
        raise BadInput(
            f"precision {named.name} needs at least one keep_fp32 pattern, such as 'blocks.7.*'; else choose "
            f"{named.pure}"
        )
    if keep_fp32 and not named.mixed:
        raise BadInput(
            f"keep_fp32 {list(keep_fp32)} has a meaning with precision {' and '.join(MIXED)} only, got {named.name}"
        )
    typed = copy.deepcopy(model).cpu().eval()
    for name, tensor in (*typed.named_parameters(), *typed.named_buffers()):
        # Buffers may hold Inf, as bounds that nothing is clipped by do.
        fits = torch.isfinite(tensor) if isinstance(tensor, nn.Parameter) else ~tensor.isnan()
        if not bool(fits.all()):
            raise BadInput(f"{name} holds NaN or Inf; the weights can't be exported")
    if named.type is FLOAT32:
        return typed.float()
    kept = kept_modules(typed, keep_fp32)
    islands = kept | {name for name, module in typed.named_modules() if isinstance(module, (*norms, PixelEntry))}
    _narrow_outside_(typed, islands, named)
    narrow = torch_dtype(named.type)
    for name, module in typed.named_modules():
        if name in islands and not _has_ancestor(name, islands):
            module.float()
            _cast_at_border_(module, inner=torch.float32, outer=narrow)
    _cast_at_border_(typed, inner=narrow, outer=torch.float32)
    return typed


def torch_dtype(float_type: FloatType) -> torch.dtype:
    dtype = getattr(torch, float_type.name)
    assert isinstance(dtype, torch.dtype), float_type
    return dtype


def kept_modules(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the modules that the patterns keep in float32. Raises BadInput when a pattern fits none."""
    names = [name for name, _ in model.named_modules() if name]
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        shown = ", ".join(names[:6])
        raise BadInput(f"keep_fp32: {', '.join(map(repr, idle))} fits no module; this model's modules are {shown}, ...")
    kept = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    kept |= {name for name in names if _has_ancestor(name, kept)}
    for name, module in reversed(list(model.named_modules())):
        children = [f"{name}.{child}" for child, _ in module.named_children()]
        if name and children and kept.issuperset(children):
            kept.add(name)
    return kept


def modules_beyond(model: nn.Module, float_type: FloatType) -> tuple[str, ...]:
    """Return the names of modules with weights of their own that the type can't hold."""
    return tuple(
        name
        for name, module in model.named_modules()
        if name
        and not all(_fits(each, float_type) for each in (*module._parameters.values(), *module._buffers.values()))
    )


def _fits(tensor: Tensor | None, float_type: FloatType) -> bool:
    if tensor is None or not tensor.is_floating_point():
        return True
    return torch.equal(tensor.to(torch_dtype(float_type)).isfinite(), tensor.isfinite())


def _narrow_outside_(model: nn.Module, islands: set[str], precision: Precision) -> None:
    for name, module in model.named_modules():
        if name in islands or _has_ancestor(name, islands):
            continue
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = _narrowed(tensor.data, precision, f"{name}.{key}".lstrip("."))


def _narrowed(tensor: torch.Tensor, precision: Precision, name: str) -> torch.Tensor:
    narrow = tensor.to(torch_dtype(precision.type))
    if not torch.equal(torch.isfinite(narrow), torch.isfinite(tensor)):
        largest = float(tensor.abs().max())
        module = name.rpartition(".")[0] or name
        raise BadInput(
            f"{name}: the largest weight is {largest:.3g}, {precision.type.name} ends at {precision.type.largest:.6g}; "
            f"use precision {mixed_with_float32(precision.type).name} with keep_fp32 {module!r}, or fp32"
        )
    return narrow


def _has_ancestor(name: str, names: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in names for depth in range(1, len(parts)))


def _cast_at_border_(module: nn.Module, *, inner: torch.dtype, outer: torch.dtype) -> None:
    """Cast floating tensors to `inner` on the way in, to `outer` on the way out."""

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)

    module.register_forward_pre_hook(lambda _, *arguments: cast(arguments, inner), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: cast(output, outer))
