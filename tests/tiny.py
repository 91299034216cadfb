"""A tiny trained-looking ViT and images for the tests of corp_deploy."""

from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calib.images import Images
from corp_deploy.families import traced_model
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from corp_deploy.store.input_sets import images_for_model

ARCHITECTURE = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7},
)


def checkpoint(seed: int = 0, **kwargs: object) -> Checkpoint:
    """A 2-block ViT (17 tokens, 3 heads of 16, hidden 192) whose weights are large enough to matter."""
    torch.manual_seed(seed)
    architecture = Architecture(name=ARCHITECTURE.name, kwargs={**ARCHITECTURE.kwargs, **kwargs})
    model = dense_from_architecture(architecture)
    enliven(model, seed)
    return Checkpoint(model=model, architecture=architecture, lineage={})


@torch.no_grad()
def enliven(model: nn.Module, seed: int) -> None:
    """Spread weights and biases so that nothing is near zero by initialisation."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2 and "embed" not in name and "token" not in name:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.3 * noise)


def images(count: int, seed: int = 0, size: int = 32) -> NDArray[np.float32]:
    """Smooth random images [count, 3, size, size] float32."""
    coarse = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear").numpy()


def opened(path: Path, pixels: NDArray[np.float32], model: nn.Module | None = None) -> Images:
    """Images [N, 3, S, S] written to the path and opened for a model, `checkpoint()` unless another is given."""
    np.save(path, pixels)
    return images_for_model(checkpoint().model if model is None else model, path)


def written(folder: Path, count: int, *, to: str = "images.npy", **kwargs: object) -> Path:
    """A folder with `checkpoint(**kwargs)` as the model directory dense, and so many images."""
    save(checkpoint(0, **kwargs), folder / "dense")
    np.save(folder / to, images(count))
    return folder


def ran(model: nn.Module, images: Tensor | NDArray[np.float32]) -> Tensor:
    """What a model of one output gives."""
    with torch.inference_mode():
        out: Tensor = model(torch.as_tensor(images))
    return out


def module_io(model: nn.Module, name: str, inputs: Tensor | NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Run a model, and return the input and the output of one of its modules."""
    caught: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, args, out: caught.append((args[0], out)))
    ran(model, inputs)
    handle.remove()
    return caught[0]


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference by that of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def timm_model(name: str, **kwargs: Any) -> nn.Module:
    """A timm model with its initial weights, in eval mode, with its program."""
    architecture = Architecture(name=name, kwargs=kwargs)
    return traced_model.trace_model(timm.create_model(name, pretrained=False, **kwargs).eval(), architecture)


def last_block(model: nn.Module) -> nn.Module:
    """Of a timm ViT: the module whose output is the last residual stream, merged or not."""
    return list(model.get_submodule("blocks").children())[-1]
