"""Each block's output of a torch module, under the names that its ONNX graph carries."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .onnx_blocks import site_of

Array = NDArray[np.float32]


def block_outputs(model: nn.Module, images_NCHW: Array, *, batch: int = 8) -> dict[str, Array]:
    """Outputs of all modules that are sites (`blocks.3`, `blocks.3.attn`, `head`), in the order computed, [N, ...].

    Modules that give no single tensor are left out. No hook is left behind.
    """
    pieces: dict[str, list[Array]] = {}

    def keep(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            pieces.setdefault(name, []).append(output.detach().float().cpu().numpy())

    sites = {name: module for name, module in model.named_modules() if name and site_of(f"{name}/") == name}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, module in sites.items()
    ]
    try:
        with torch.inference_mode():
            for start in range(0, len(images_NCHW), batch):
                model(torch.from_numpy(np.ascontiguousarray(images_NCHW[start : start + batch])))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: np.concatenate(rows) for name, rows in pieces.items()}
