"""torchvision's classifiers, traced, with the preprocessing of torchvision's weights.

The library is imported in the functions that use it.
"""

import re
from collections.abc import Mapping
from math import floor, isqrt
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.spec.architecture import OF_TORCHVISION, Architecture, Preprocessing
from corp_deploy.traced.models.module import batch_counters, refuse_larger, traced_module
from ground.errors import BadInput

from .module_facts import facts_of_images

PREFIX = OF_TORCHVISION
State = Mapping[str, Tensor]
_OF_TRAINING = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
"""The prefixes of layers that only run in training."""
_OLD = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..+)")
"""The names of DenseNets' layers in torchvision's own files, such as norm.1 for norm1."""


def _library() -> Any:
    import torchvision  # type: ignore[import-untyped]

    return torchvision.models


def require_classifier(text: str) -> tuple[str, Any]:
    """Return the name in `torchvision:NAME` or `torchvision:NAME.WEIGHTS`, and torchvision's entry of the weights.

    The entry has the preprocessing; without WEIGHTS it is the first one. Raises BadInput for any other text.
    """
    name, _, weights = text.removeprefix(PREFIX).partition(".")
    library = _library()
    names = library.list_models(module=library)
    if name not in names:
        raise BadInput(f"--model {text:.100}: no classifier of torchvision's; expected one of {', '.join(names)}")
    entries = library.get_model_weights(name)
    if weights and weights not in entries.__members__:
        raise BadInput(
            f"--model {text:.100}: expected one of {', '.join(f'{name}.{each}' for each in entries.__members__)}"
        )
    return name, entries[weights] if weights else next(iter(entries))


def architecture_of_classifier(
    text: str, kwargs: Mapping[str, Any], preprocessing: Preprocessing, state: State | None = None
) -> Architecture:
    """Return the architecture that config.json keeps.

    The size and the preprocessing of images are those of torchvision's weights where `kwargs` and `preprocessing` have
    none; the numbers of classes and of a VisionTransformer's positions are those of the `state`. Raises BadInput for an
    unknown name, and for arguments that ask for weights.
    """
    name, entry = require_classifier(text)
    if reserved := [key for key in kwargs if key.startswith("weights") or key in ("pretrained", "progress")]:
        raise BadInput(f"--model-kwargs: {reserved[0]}: nothing is downloaded; give --weights FILE")
    own: dict[str, Any] = {"transform_input": True} if name in _OF_TRAINING else {}
    side = None
    if state is not None and {"encoder.pos_embedding", "conv_proj.weight"} <= state.keys():
        # The side of the square images that a VisionTransformer's positions are for.
        side = isqrt(state["encoder.pos_embedding"].shape[1] - 1) * int(state["conv_proj.weight"].shape[-1])
        if kwargs.get("img_size", side) not in (side, [side, side]):
            raise BadInput(
                f"--model {text:.100}: its weights have positions for images of {side}x{side}, --model-kwargs ask for "
                f"img_size {kwargs['img_size']}; leave img_size out"
            )
        entry = next((each for each in type(entry) if each.transforms().crop_size[0] == side), entry)
    if name.startswith("vit_"):
        own["image_size"] = side or kwargs.get("img_size", entry.transforms().crop_size[0])
    prepares = entry.transforms()
    if state is not None and "num_classes" not in kwargs:
        # The number of rows of the classifier, unless the weights are another model's.
        with torch.device("meta"):
            model = _built(Architecture(name=PREFIX + name))
        classifier = [key for key, each in model.named_parameters() if each.dim() > 1][-1]
        own |= {"num_classes": len(state[classifier])} if classifier in state else {}
    images = Preprocessing(
        mean=tuple(prepares.mean),
        std=tuple(prepares.std),
        # Rounded down, since timm, which prepares the images, truncates the side that it resizes to.
        crop_pct=floor(prepares.crop_size[0] / prepares.resize_size[0] * 1e6) / 1e6,
        interpolation=prepares.interpolation.value,
        crop_mode="center",
    )
    return Architecture(
        name=PREFIX + name,
        kwargs={**own, "img_size": own.get("image_size", prepares.crop_size[0]), **kwargs},
        preprocessing=Preprocessing(**{**images.settings, **preprocessing.for_channels(3).settings}),
        family="traced",
    )


def possible_names(model: nn.Module) -> list[str]:
    """Return the names `torchvision:NAME` of classifiers built in the file of a module's class; none elsewhere."""
    library, home = _library(), type(model).__module__
    if not home.startswith("torchvision.models."):
        return []
    every = (library.get_model_builder(name) for name in library.list_models(module=library))
    return [PREFIX + each.__name__ for each in every if each.__module__ == home]


def build_classifier(architecture: Architecture) -> nn.Module:
    """Return the traced model with its initial weights. Raises BadInput where torchvision can't build it."""
    refuse_larger(lambda: _built(architecture), architecture.name)
    model, size = _built(architecture).eval(), architecture.kwargs.get("img_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return traced_module(model, facts_of_images(model, (3, int(height), int(width)), architecture.preprocessing))


def _built(architecture: Architecture) -> nn.Module:
    name, _ = require_classifier(architecture.name)
    arguments = {key: value for key, value in architecture.kwargs.items() if key != "img_size"}
    trained = {"aux_logits": False, "init_weights": False} if name in _OF_TRAINING else {}
    try:
        model: nn.Module = _library().get_model(name, weights=None, **trained, **arguments)
    except Exception as error:
        raise BadInput(
            f"--model {architecture.name} with arguments {arguments!r:.200}: torchvision can't build it "
            f"({type(error).__name__}: {str(error)[:200]}); check --model-kwargs"
        ) from None
    return model


def rename_state(architecture: Architecture, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, and missing batch counters, by torchvision's present names, without layers of training alone."""
    beside = _OF_TRAINING.get(architecture.name.removeprefix(PREFIX), ())
    renamed = {_OLD.sub(r"\1\2", name): each for name, each in state.items() if not name.startswith(beside or ("\0",))}
    return {**batch_counters(model), **renamed}
