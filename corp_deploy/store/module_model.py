"""A model that is in memory already: timm's, as timm.create_model gives it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.families import timm_library
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import image_spec
from corp_deploy.families.preprocessing import Preprocessing
from ground.errors import BadInput
from ground.records import record_from_value

from .checkpoint import Checkpoint, dense_from_architecture
from .dense_model import with_weights
from .weights import Weights

WHERE = Path("the module")  # as notes and messages name weights that are in no file
IMAGES = 2
MOST_APART = 1e-4  # of the outputs' norm: norms that are folded into convolutions round otherwise
INSTEAD = (
    "save its state_dict() with safetensors and give corp_deploy.Source(NAME, weights=FILE, kwargs={...}) with the "
    "arguments that it was made with, or the directory that it came from"
)


def _architecture(model: nn.Module, config: dict[str, Any]) -> Architecture:
    """What builds it again, as far as the module tells."""
    kwargs = timm_library.input_and_classes(model, timm_library.made_size(model))
    return Architecture(name=str(config["architecture"]), kwargs=kwargs)


def _answers(model: nn.Module, images_NCHW: Tensor) -> Tensor:
    answers: Any = model(images_NCHW)
    if not isinstance(answers, Tensor):
        raise BadInput(f"model gives {type(answers).__name__}, expected one tensor; {INSTEAD}")
    return answers


def _require_same(model: nn.Module, built: nn.Module) -> None:
    """Raise BadInput where both answer otherwise: what a module was made with can't all be read off it."""
    images_NCHW = torch.randn(IMAGES, *image_spec(built).shape, generator=torch.Generator().manual_seed(0))
    where = next(model.parameters())
    was_training = model.training
    try:
        with torch.inference_mode():
            expected = _answers(model.eval(), images_NCHW.to(where)).float().cpu()
    finally:
        model.train(was_training)
    with torch.inference_mode():
        actual = _answers(built, images_NCHW)
    apart = (actual - expected).norm() / expected.norm() if actual.shape == expected.shape else torch.tensor(torch.inf)
    if not apart <= MOST_APART:
        raise BadInput(
            f"model: rebuilt by its name it gives other outputs (relative error {float(apart):.2g} on random "
            f"images), so it was made with arguments that the module does not record; {INSTEAD}"
        )


def checkpoint_from_module(model: nn.Module) -> Checkpoint:
    """timm's model that a module is, built anew with a copy of its weights; the module stays as it is.

    Raises BadInput for a module of another library, and for one whose answers differ from those of the model built
    anew from its name, classes and image size.
    """
    config: Any = getattr(model, "pretrained_cfg", None)
    settings = dict(config) if config else {}
    if not settings.get("architecture"):
        raise BadInput(f"model is {type(model).__name__}, expected a module that timm.create_model made; {INSTEAD}")
    own = record_from_value(settings, Preprocessing, where="model: its pretrained_cfg", remedy=INSTEAD)
    architecture = replace(_architecture(model, settings), preprocessing=own)
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    read = Weights(path=WHERE, state=state)
    try:
        built = with_weights(
            dense_from_architecture(architecture), architecture, read, Preprocessing(), lambda _: "the module's own"
        )
    except BadInput as error:
        raise BadInput(f"{error}; {INSTEAD}") from None
    _require_same(model, built.model)
    return built
