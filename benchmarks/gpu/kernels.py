"""The attention kernel that torch ran, by the names in a profile."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

# The order matters: cuDNN's kernels have "flash" in their names too, and softmax marks attention that is not fused.
KINDS = {
    "cudnn": re.compile(r"cudnn.*(sdpa|attention|fmha|flash)|_cudnn_attention"),
    "mem-efficient": re.compile(r"fmha_cutlass|_efficient_attention|attention_kernel_batched"),
    "flash": re.compile(r"flash_?(attn|attention|fwd|fprop)", re.IGNORECASE),
    "math": re.compile(r"softmax|_attention_math", re.IGNORECASE),
}


def kind_of(name: str) -> str | None:
    """Return the kind of attention of a kernel or operator, None if it is no attention."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), None)


def attention_kind(names: Iterable[str]) -> str:
    """Return flash, mem-efficient, cudnn or math, joined by + if a profile has several, or `none seen`.

    Softmax counts only without a fused attention, since other layers may have one too.
    """
    found = {kind for name in names if (kind := kind_of(name)) is not None}
    fused = sorted(found - {"math"})
    return " + ".join(fused) or ("math" if found else "none seen")


def profiled(module: nn.Module, images: Tensor) -> dict[str, Any]:
    """Profile one warm call; return its kind of attention, and the names of the kernels or operators that show it."""
    on_gpu = images.is_cuda
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with torch.inference_mode():
        module(images)
        with profile(activities=activities, acc_events=True) as profiler:
            module(images)
            if on_gpu:
                torch.cuda.synchronize()
    # Kernels before the operators that launched them.
    names = sorted({event.key for event in profiler.key_averages()}, key=lambda name: (name.startswith("aten::"), name))
    telling = [name[:160] for name in names if kind_of(name) is not None]
    return {"kind": attention_kind(names), "names": telling[:6]}
