"""Sums over tokens: float32 products of one image at a time, float64 sums over images.

Each product spans the tokens of one image, at most CHUNK of them, so no float32 sum is longer than CHUNK terms and
nothing depends on which images share a batch: batch size and order move the results by float64 rounding only.

Shapes: B images, N tokens, n tokens of a chunk, F channels, R rows of a block, H heads, D dims.
"""

import torch
from torch import Tensor

CHUNK = 512
CPU_ROWS = 192
CPU_IMAGES = 4
GPU_ROWS = 1024


def _times(a_Rn: Tensor, b_Fn: Tensor) -> Tensor:
    """a b^T of contiguous float32 matrices.

    On a CPU by oneDNN, whose AVX-512 kernels take half the time of MKL's on AMD and about as long elsewhere; torch
    sends float32 there only by this operator.
    """
    if a_Rn.device.type == "cpu" and torch.backends.mkldnn.is_available():
        product_RF: Tensor = torch.ops.mkldnn._linear_pointwise(a_Rn, b_Fn, None, "none", [], "")
        return product_RF
    return a_Rn @ b_Fn.T


def _add_gram_on_cpu(total_FF: Tensor, x_BNF: Tensor) -> None:
    """A few images at a time, transposed once, so that a block row of the sums stays in cache for all of them."""
    for x_GNF in torch.split(x_BNF, CPU_IMAGES):
        parts = [x_nF.T.float().contiguous() for x_NF in x_GNF for x_nF in torch.split(x_NF, CHUNK)]
        for start in range(0, len(total_FF), CPU_ROWS):
            stop = start + CPU_ROWS
            block_RF = total_FF[start:stop, start:]
            for x_Fn in parts:
                block_RF.add_(_times(x_Fn[start:stop], x_Fn[start:]))


def _add_gram_on_gpu(total_FF: Tensor, x_BNF: Tensor) -> None:
    """Several images per launch, as many as need no more memory than x itself."""
    width = x_BNF.shape[-1]
    group = max(1, x_BNF.numel() // (3 * GPU_ROWS * width))
    for x_GNF in torch.split(x_BNF, group):
        for x_GnF in torch.split(x_GNF.float(), CHUNK, dim=1):
            for start in range(0, width, GPU_ROWS):
                stop = start + GPU_ROWS
                product_GRF = torch.bmm(x_GnF[:, :, start:stop].mT, x_GnF[:, :, start:])
                total_FF[start:stop, start:].add_(product_GRF.sum(0, dtype=torch.float64))


def add_gram(total_FF: Tensor, x_BNF: Tensor) -> None:
    """Adds the sum of x x^T to the blocks of total_FF on and above its diagonal; `mirror` fills the rest.

    Block row i starts at its diagonal block, which saves almost half the multiplications of the whole product.
    """
    if x_BNF.device.type == "cpu":
        _add_gram_on_cpu(total_FF, x_BNF)
    else:
        _add_gram_on_gpu(total_FF, x_BNF)


def mirror(total_FF: Tensor) -> None:
    """Copies what lies above the diagonal blocks of `add_gram` below them, in place."""
    rows = CPU_ROWS if total_FF.device.type == "cpu" else GPU_ROWS
    for start in range(0, len(total_FF), rows):
        stop = start + rows
        total_FF[stop:, start:stop] = total_FF[start:stop, stop:].T


def add_sum(total_F: Tensor, x_BNF: Tensor) -> None:
    """Adds the sum over images and tokens."""
    total_F.add_(x_BNF.float().sum(1).double().sum(0))


def add_active(total_F: Tensor, x_BNF: Tensor, eps: float) -> None:
    """Adds the number of entries with |x| > eps; counts below 2^24 are exact in float32."""
    above_NF = torch.empty(x_BNF.shape[1:], dtype=torch.float32, device=x_BNF.device)
    for x_NF in x_BNF:
        torch.abs(x_NF.float(), out=above_NF)
        total_F.add_(torch.gt(above_NF, eps, out=above_NF).sum(0))


def gram_of_heads(x_HND: Tensor) -> Tensor:
    """x^T x per head of one image, [H,D,D] float64."""
    chunks = torch.split(x_HND.float(), CHUNK, dim=1)
    gram_HDD = (chunks[0].mT @ chunks[0]).double()
    for x_HnD in chunks[1:]:
        gram_HDD.add_(x_HnD.mT @ x_HnD)
    return gram_HDD


def half(x_DD: Tensor) -> Tensor:
    """Entries on and above the diagonal of the last two dims, row-major: [..., D(D+1)/2]."""
    rows, columns = torch.triu_indices(x_DD.shape[-1], x_DD.shape[-1], device=x_DD.device)
    return x_DD[..., rows, columns]
