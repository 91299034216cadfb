"""torchvision's classifiers that are none of timm's: built by torchvision, images prepared as its weights take them."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .architecture import MOST_PARAMETERS, Architecture
from .module_facts import facts_with
from .modules import counts_of_batches, parameters
from .own_modules import PREPARED
from .preprocessing import Preprocessing
from .timm_images import ImageSpec
from .torchvision_names import PREFIX, library, require_classifier
from .torchvision_twin import crop_pct
from .traced_module import traced_module

_OF_TRAINING = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
"""Beside the classifier, never run once trained."""
_OLD = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..+)")
"""How torchvision's own files of DenseNets name layers."""


def architecture_of(text: str, kwargs: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """As config.json keeps it: images of the size and the preparation of torchvision's own weights where none are said.
    Raises BadInput for an unknown name, and for arguments that ask for weights.
    """
    name, entry = require_classifier(text)
    if asked := [key for key in kwargs if key.startswith("weights") or key in ("pretrained", "progress")]:
        raise BadInput(f"--model-kwargs: {asked[0]}: nothing is downloaded; give --weights FILE")
    prepares = entry.transforms()
    side = prepares.crop_size[0]
    own = {"transform_input": True} if name in _OF_TRAINING else {}
    images = Preprocessing(
        mean=tuple(prepares.mean),
        std=tuple(prepares.std),
        crop_pct=crop_pct(prepares.resize_size[0], side),
        interpolation=prepares.interpolation.value,
        crop_mode="center",
    )
    return Architecture(
        name=PREFIX + name,
        kwargs={**own, "img_size": side, **kwargs},
        preprocessing=Preprocessing(**{**images.settings, **preprocessing.for_channels(3).settings}),
        family="traced",
    )


def build(architecture: Architecture) -> nn.Module:
    """The model with its initial weights, on torch's default device. Raises BadInput where torchvision can't build it
    or it takes images of another size, and for more parameters than are built.
    """
    with torch.device("meta"):
        count = parameters(_made(architecture))
    if count > MOST_PARAMETERS:
        raise BadInput(f"{architecture.name}: {count:,} parameters; {MOST_PARAMETERS:,} at most are built")
    model, size = _made(architecture).eval(), architecture.kwargs.get("img_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (3, int(height), int(width))
    config = {**PREPARED, **architecture.preprocessing.settings, "input_size": shape}
    return traced_module(model, facts_with(model, ImageSpec(shape=shape, config=config), ()))


def _made(architecture: Architecture) -> nn.Module:
    name, _ = require_classifier(architecture.name)
    arguments = {key: value for key, value in architecture.kwargs.items() if key != "img_size"}
    trained = {"aux_logits": False, "init_weights": False} if name in _OF_TRAINING else {}
    try:
        model: nn.Module = library().get_model(name, weights=None, **trained, **arguments)
    except Exception as error:
        raise BadInput(
            f"--model {architecture.name} with arguments {arguments!r:.200}: torchvision can't build it "
            f"({type(error).__name__}: {str(error)[:200]}); check --model-kwargs"
        ) from None
    return model


def own_state(architecture: Architecture, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names of today's torchvision, without what only training runs."""
    beside = _OF_TRAINING.get(architecture.name.removeprefix(PREFIX), ())
    renamed = {_OLD.sub(r"\1\2", name): each for name, each in state.items() if not name.startswith(beside or ("\0",))}
    return {**counts_of_batches(model), **renamed}
