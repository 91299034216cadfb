"""Sums and Grams of activations: float32 products of parts of the tokens, added in float64, each token by its weight.

A wide Gram, of channels, takes all tokens of a forward pass in parts of TERMS tokens. Its error is 2e-6 of its scale
where all terms have one sign, and 1e-7 elsewhere. Grams of q and k are made for each image, in parts of CHUNK tokens.
On a GPU a part has CHUNK tokens, or TERMS for bfloat16, whose products are exact in float32 (error 5e-6 on an H100).

Shapes: B images, N tokens, n tokens of a chunk, F channels, R rows of a block, H heads, D dims.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from ground.errors import BadInput

from .inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialTokenWeights:
    """Weights [B,N] for activations with N tokens; in activations with other numbers all tokens count equally."""

    weight_BN: Tensor


TokenWeights = Callable[[Inputs], Tensor | PartialTokenWeights | None]
"""A function from a batch to the weights [B,N] of its tokens, none negative; None where all count equally."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassWeights:
    """The token weights of one forward pass, float32, and their sum."""

    weight_BN: Tensor
    total: float

    def along(self, x: Tensor) -> Tensor:
        return self.weight_BN.view(len(x), *[1] * (x.ndim - 3), -1, 1)


def pass_weights(weight_BN: Tensor, device: torch.device) -> PassWeights:
    total = float(weight_BN.double().sum())
    device_weight_BN = weight_BN.float().to(device, non_blocking=True)
    return PassWeights(weight_BN=device_weight_BN, total=int(total) if total.is_integer() else total)


def weights_by_tokens(weight_BN: Tensor, count: int, device: torch.device) -> Mapping[int, PassWeights]:
    """Return the weights by number of tokens: [B,N] for N; for 1, [B,1] with 1 where any token has weight, else 0.

    Raises BadInput unless the weights are [count,N], finite and not negative.
    """
    shape = list(weight_BN.shape)
    if weight_BN.ndim != 2 or shape[0] != count or not shape[1] or weight_BN.is_complex():
        raise BadInput(f"token weights: got {weight_BN.dtype} {shape}, expected numbers [{count}, tokens]")
    weight_BN = weight_BN.float()
    if not bool((torch.isfinite(weight_BN) & (weight_BN >= 0)).all()):
        span = f"{float(weight_BN.min()):g} to {float(weight_BN.max()):g}"
        raise BadInput(f"token weights: got numbers from {span}, expected finite ones of 0 or more")
    any_B1 = (weight_BN > 0).any(1, keepdim=True).float()
    return {1: pass_weights(any_B1, device), shape[1]: pass_weights(weight_BN, device)}


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return (x.float() * factor).masked_fill_(factor == 0, 0.0)


def weighted(x: Tensor, weights: PassWeights | None) -> Tensor:
    return x if weights is None else _scaled(x, weights.along(x))


def weighted_by_root(x: Tensor, weights: PassWeights | None) -> Tensor:
    """Multiply x [B,...,N,F] by the square root of each token's weight, so that products are weighted."""
    return x if weights is None else _scaled(x, weights.along(x).sqrt())


def token_count(x_BNF: Tensor, weights: PassWeights | None) -> float:
    return x_BNF.shape[0] * x_BNF.shape[1] if weights is None else weights.total


TERMS = 2048
CHUNK = 512
CPU_ROWS = 192
GPU_ROWS = 1024
TRIAL_SHAPE = (8, 128, 512)
TRIALS = 5
MARGIN = 0.9

Kernel = Literal["blas", "onednn"]


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Set torch's process-wide precision within the context: `highest` forbids TF32, `high` allows it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _parts(x_nF: Tensor) -> tuple[Tensor, ...]:
    return x_nF.chunk(math.ceil(len(x_nF) / TERMS))


def _product_by_onednn(x_Fn: Tensor, start: int) -> Tensor:
    """Return the block row of x x^T that begins at `start`, by oneDNN, which takes both operands transposed."""
    left_Rn, right_Fn = x_Fn[start : start + CPU_ROWS], x_Fn[start:]
    product_RF: Tensor = torch.ops.mkldnn._linear_pointwise(left_Rn, right_Fn, None, "none", [], "")
    return product_RF


def _add_gram_on_cpu_(total_FF: Tensor, x_BNF: Tensor, kernel: Kernel) -> None:
    for x_nF in _parts(x_BNF.flatten(0, 1).float()):
        x_Fn = x_nF.T.contiguous() if kernel == "onednn" else x_nF.T
        for start in range(0, len(total_FF), CPU_ROWS):
            stop = start + CPU_ROWS
            by_blas = kernel == "blas"
            product_RF = x_Fn[start:stop] @ x_nF[:, start:] if by_blas else _product_by_onednn(x_Fn, start)
            total_FF[start:stop, start:].add_(product_RF)


def faster_kernel(clock: Callable[[], float]) -> Kernel:
    """Return the faster kernel for wide Grams on this CPU, timed in 35 ms.

    MKL runs at half its speed on AMD; on Intel it is a fifth faster than oneDNN. The fastest of several trials counts,
    and oneDNN has to be a tenth faster, so that noise doesn't decide.
    """
    x_BNF, total_FF = torch.ones(TRIAL_SHAPE), torch.zeros(TRIAL_SHAPE[-1], TRIAL_SHAPE[-1], dtype=torch.float64)
    took: dict[Kernel, list[float]] = {"blas": [], "onednn": []}
    for _ in range(TRIALS):
        for kernel, samples in took.items():
            begun = clock()
            _add_gram_on_cpu_(total_FF, x_BNF, kernel)
            samples.append(clock() - begun)
    return "onednn" if min(took["onednn"]) < MARGIN * min(took["blas"]) else "blas"


@cache
def kernel_of_this_cpu() -> Kernel:
    return faster_kernel(time.process_time)


def kernel_for(width: int) -> Kernel:
    timed = width >= TRIAL_SHAPE[-1] and torch.backends.mkldnn.is_available()
    return kernel_of_this_cpu() if timed else "blas"


def _add_gram_on_gpu_(total_FF: Tensor, x_BNF: Tensor) -> None:
    x_XF = x_BNF.flatten(0, 1)
    exact = x_XF.dtype == torch.bfloat16 and x_XF.is_cuda
    for x_nF in _parts(x_XF) if exact else x_XF.float().split(CHUNK):
        for start in range(0, len(total_FF), GPU_ROWS):
            stop = start + GPU_ROWS
            left_Rn, right_nF = x_nF[:, start:stop].T, x_nF[:, start:]
            product_RF = torch.mm(left_Rn, right_nF, out_dtype=torch.float32) if exact else left_Rn @ right_nF
            total_FF[start:stop, start:].add_(product_RF)


def add_gram_(total_FF: Tensor, x_BNF: Tensor, kernel: Kernel | None = None) -> None:
    """Add the sum of x x^T to the blocks on and above the diagonal; `mirror_` completes the matrix.

    Block row i starts at its diagonal block, which saves almost half the multiplications.
    """
    if x_BNF.device.type == "cpu":
        _add_gram_on_cpu_(total_FF, x_BNF, kernel or kernel_for(len(total_FF)))
    else:
        _add_gram_on_gpu_(total_FF, x_BNF)


def mirror_(total_FF: Tensor) -> None:
    """Copy the upper triangle to the lower one, in place; matrix products round the two differently."""
    rows = CPU_ROWS if total_FF.device.type == "cpu" else GPU_ROWS
    for start in range(0, total_FF.shape[-1], rows):
        stop = start + rows
        total_FF[..., stop:, start:stop] = total_FF[..., start:stop, stop:].mT
        block_RR = total_FF[..., start:stop, start:stop]
        block_RR.copy_(block_RR.triu() + block_RR.triu(1).mT)


def add_sum_(total_F: Tensor, x_BNF: Tensor) -> None:
    total_F.add_(x_BNF.float().sum(1).double().sum(0))


def add_active_(total_F: Tensor, x_BNF: Tensor, eps: float, weight_BN: Tensor | None = None) -> None:
    """Add each channel's count of |x| > eps, or the weights of these tokens; float32 counts exactly up to 2^24."""
    if x_BNF.device.type != "cpu":
        above_BNF = x_BNF.abs() > eps
        total_F.add_((above_BNF if weight_BN is None else above_BNF * weight_BN[..., None]).sum((0, 1)))
        return
    above_NF = torch.empty(x_BNF.shape[1:], dtype=torch.float32, device=x_BNF.device)
    for index, x_NF in enumerate(x_BNF):
        torch.abs(x_NF.float(), out=above_NF)
        torch.gt(above_NF, eps, out=above_NF)
        if weight_BN is not None:
            above_NF.mul_(weight_BN[index, :, None])
        total_F.add_(above_NF.sum(0))


def grams_of_heads(x_BHND: Tensor) -> Tensor:
    """Return x^T x of each image and head, [B,H,D,D] float64."""
    first, *rest = torch.split(x_BHND.float().contiguous(), CHUNK, dim=2)
    gram_BHDD = (first.mT @ first).double()
    for x_BHnD in rest:
        gram_BHDD.add_(x_BHnD.mT @ x_BHnD)
    return gram_BHDD


def upper_triangle(x_DD: Tensor) -> Tensor:
    """Return the entries on and above the diagonal of the last two dims, row by row: [..., D(D+1)/2]."""
    rows, columns = torch.triu_indices(x_DD.shape[-1], x_DD.shape[-1], device=x_DD.device)
    return x_DD[..., rows, columns]
