"""In which precision a polish computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def reduced_precision(where: torch.device) -> AbstractContextManager[Any]:
    """On a GPU products in bfloat16, with weights, gradients and errors in float32; on a CPU float32 throughout."""
    return torch.autocast("cuda", torch.bfloat16) if where.type == "cuda" else nullcontext()


@contextmanager
def tf32(where: torch.device) -> Iterator[None]:
    """On a GPU the products that stay float32 by TF32, as long as the body lasts."""
    if where.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
