"""In which precision a polish computes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from calib.products import matmul_precision


def reduced_precision(where: torch.device) -> AbstractContextManager[Any]:
    """On a GPU products in bfloat16, with weights, gradients and errors in float32; on a CPU float32 throughout."""
    return torch.autocast("cuda", torch.bfloat16) if where.type == "cuda" else nullcontext()


def tf32(where: torch.device) -> AbstractContextManager[None]:
    """On a GPU the products that stay float32 by TF32, as long as the body lasts."""
    return matmul_precision("high") if where.type == "cuda" else nullcontext()
