"""Typed copies of a model: in float32, float16 or bfloat16, or mixed with float32; ports stay float32."""

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
# Modules that take means of squares, which overflow or lose precision in sixteen bits.
NORMS: Norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)


def typed_copy(model: nn.Module, precision: str, keep_fp32: Sequence[str] = (), *, norms: Norms = NORMS) -> nn.Module:
    """Return a copy on the CPU in eval mode, in this precision; floats at its ports stay float32.

    fp16 and bf16 hold everything in sixteen bits, except modules of the types `norms` and the normalisation of pixels;
    mixed precisions also except modules that match `keep_fp32`. A module is kept if all its children are, so that
    `blocks.7.*` keeps the block's residual additions. Raises BadInput for an unknown precision, patterns that fit
    nothing, and weights that the type can't hold.
    """
    named = precision_by_name(precision)
    if named.mixed and not keep_fp32:
        raise BadInput(
            f"precision {named.name} needs at least one keep_fp32 pattern, such as 'blocks.7.*'; without one choose "
            f"{named.pure}"
        )
    if keep_fp32 and not named.mixed:
        raise BadInput(f"keep_fp32 {list(keep_fp32)} needs precision {' or '.join(MIXED)}, got {named.name}")
    typed = copy.deepcopy(model).cpu().eval()
    for name, tensor in (*typed.named_parameters(), *typed.named_buffers()):
        # Buffers may hold Inf, as bounds that never clip.
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
    """Return the names of the modules that the patterns keep in float32. Raises BadInput when a pattern fits none."""
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
    """Return the names of modules with weights or buffers of their own that become infinite in the type."""
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
            if not _fits(tensor, precision.type):
                raise BadInput(
                    f"{name}.{key}".lstrip(".") + f": the largest weight is {float(tensor.data.abs().max()):.3g}, "
                    f"{precision.type.name} ends at {precision.type.largest:.6g}; use precision "
                    f"{mixed_with_float32(precision.type).name} with keep_fp32 {name or key!r}, or fp32"
                )
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch_dtype(precision.type))


def _has_ancestor(name: str, names: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in names for depth in range(1, len(parts)))


def _cast_at_border_(module: nn.Module, *, inner: torch.dtype, outer: torch.dtype) -> None:
    """Add hooks that cast a module's floating-point inputs to `inner` and its outputs to `outer`."""

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)

    module.register_forward_pre_hook(lambda _, *arguments: cast(arguments, inner), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: cast(output, outer))
