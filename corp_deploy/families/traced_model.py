"""The family of all models that have none: their sites are found in the program that torch traces of them.

Such a model is run whole: nothing is known of what lies between its sites.
"""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort

from . import timm_library
from .architecture import Architecture
from .merging import Merging
from .modules import replaced
from .own_modules import PREPARED
from .own_modules import grid as grid
from .own_modules import merging_of as merging_of
from .own_modules import steps as steps
from .own_modules import token_kinds as token_kinds
from .own_modules import token_weights as token_weights
from .sites import Sites
from .timm_images import ImageSpec
from .timm_library import beside as beside
from .timm_library import own_state as own_state
from .timm_library import take_beside_ as take_beside_
from .timm_library import unused as unused
from .traced_module import Facts, TracedModule, Tracing, known_of, traced_module, tracing_of
from .traced_sites import traced_sites
from .unmergeable import copy_without_merging
from .widths import HeadGeometry

NAME = "traced"
FIXED_PARTS: tuple[str, ...] = ()
SIDES = (224, 256, 384, 192, 128, 96, 64, 32, 28)
"""Of images, those that most models are made for first."""
_WHOLE = (
    "its sites were found in its traced program, which is run whole, so no block can be followed; leave away "
    "--closed-loop, --polish and --merge-tokens"
)


def accepts(model: nn.Module) -> bool:
    return isinstance(model, TracedModule)


def build(architecture: Architecture) -> nn.Module:
    """Raises BadInput: what is traced is built by its library or its code."""
    raise BadInput(f"family {NAME}: {architecture.name:.100} is built by no family of this name; write the model again")


def traced(model: nn.Module, architecture: Architecture) -> nn.Module:
    """A model of no other family as one whose sites are found in its program. Raises BadInput where it takes no images
    of a size that can be told.
    """
    if architecture.family == "timm":
        if architecture.kwargs.get("img_size") is not None:
            timm_library.set_size_(model, architecture.kwargs["img_size"])
        return traced_module(model, None)
    shape, given = _tried(model)
    prepared = PREPARED | architecture.preprocessing.spread(shape[0]).settings
    spec = ImageSpec(shape=shape, config={**prepared, "input_size": shape})
    of_classes = given.dim() == 2
    port = LOGITS if of_classes else OutputPort(name=LOGITS.name, role="feature map")
    return traced_module(model, Facts(spec=spec, port=port, classes=given.shape[-1] if of_classes else 0))


def _tried(model: nn.Module) -> tuple[tuple[int, int, int], Tensor]:
    """The shape of images that a module takes, as it says (`input_size`) or the first of SIDES that it runs with, and
    what it gives for two of them.
    """
    said = vars(model).get("input_size")
    channels = next((each.in_channels for each in model.modules() if isinstance(each, nn.Conv2d)), 3)
    shapes = [tuple(map(int, said))] if said is not None else [(channels, side, side) for side in SIDES]
    empty = copy.deepcopy(model).to("meta")
    reason = ""
    for shape in shapes:
        try:
            with torch.no_grad():
                given = empty(torch.zeros(2, *shape, device="meta"))
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if isinstance(given, Tensor) and given.dim() >= 2 and len(shape) == 3:
            return (shape[0], shape[1], shape[2]), given
        reason = f"it gives a {type(given).__name__} for images {list(shape)}, expected one tensor"
    raise BadInput(
        f"{type(model).__name__}: no size of images is known that it takes ({reason}); (a) let it say "
        "`input_size = (3, height, width)`; (b) a module that takes or gives more than one tensor can't be reduced; "
        "(c) name its sites, with corp_deploy.sites(...)"
    )


def facts_of(model: nn.Module) -> Facts:
    """All that is known beside the program."""
    return Facts(spec=input_spec(model), port=output_ports(model)[0], classes=classes(model))


def tracing(model: nn.Module) -> Tracing:
    """The model's program and what is found there."""
    return tracing_of(model, input_spec(model).shape)


def sites(model: nn.Module) -> Sites:
    """What is found in the program, dense or already reduced."""
    return traced_sites(tracing(model))


def listened(model: nn.Module) -> nn.Module:
    """What hears the model's sites while it runs."""
    return tracing(model).heard[0]


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """Raises BadInput: there is no stream to follow."""
    raise BadInput(f"{type(model).__name__}: {_WHOLE}")


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """Raises BadInput: there is no stream that it could be of."""
    raise BadInput(f"{type(model).__name__}: {_WHOLE}")


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """Raises BadInput: there is no stream that it could be of."""
    raise BadInput(f"{type(model).__name__}: {_WHOLE}")


def with_merging(model: nn.Module, merging: Merging | None) -> nn.Module:
    """A copy, where nothing is to be merged. Raises BadInput for a merging."""
    return copy_without_merging(model, merging, merging_refusal(model))


def merging_refusal(model: nn.Module) -> str:
    return "of a model that is traced no tokens are known"


def depth(model: nn.Module) -> int:
    """Blocks aren't known; sites are."""
    return len(sites(model).every)


def input_spec(model: nn.Module) -> ImageSpec:
    """Of timm's models as timm's configuration says, of others as they say or as they were tried."""
    facts = known_of(model).facts
    return timm_library.image_spec(model, timm_library.configured_size(model)) if facts is None else facts.spec


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    facts = known_of(model).facts
    return timm_library.output_ports(model) if facts is None else (facts.port,)


def classes(model: nn.Module) -> int:
    """How many classes its output tells apart; 0 for one that is none of logits."""
    facts = known_of(model).facts
    return timm_library.classes(model) if facts is None else facts.classes


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode, as it is."""
    return replaced(model, {}).eval().requires_grad_(False)


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by the filter that stands beside its class in timm, where one does."""
    library = sys.modules[known_of(model).plain.__module__]
    adapt: Any = vars(library).get("checkpoint_filter_fn")
    return dict(state) if adapt is None else dict(adapt(dict(state), model))
