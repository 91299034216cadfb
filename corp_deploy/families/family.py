"""How a model is built by the family that config.json names, and what is told of it once it is traced.

Builders alone spell their library's names. What is done at a site is the business of the kind of site.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from calib.inputs import Inputs
from calib.products import PartialTokenWeights, TokenWeights
from corp_deploy.traced.models.array_inputs import ArraySpec, batch_of_ports
from corp_deploy.traced.models.module import TracedModule, device
from corp_deploy.traced.models.outputs import Outputs
from ground.errors import BadInput
from ground.ports import Port

from . import bert, custom_modules, decoder, given_module, hf_classes, timm_library, torchvision_models, traced_model
from .architecture import Architecture
from .timm_images import ImageSpec
from .timm_maps import with_named_maps
from .tokenizer import SequenceSpec, TextSpec
from .traced_model import answers as answers
from .traced_model import has_uneven_heads as has_uneven_heads
from .traced_model import known_numbers as known_numbers
from .traced_model import layers_of as layers_of
from .traced_model import listened as listened
from .traced_model import output_ports as output_ports
from .traced_model import sites_of as sites_of
from .traced_model import steps_to_outputs as steps_to_outputs
from .trusted_code import FAMILY

Spec = TypeVar("Spec", ImageSpec, TextSpec, ArraySpec)


def _of_library(architecture: Architecture) -> nn.Module:
    """A model of transformers or of torchvision. Raises BadInput for any other name."""
    for library in (hf_classes, torchvision_models):
        if architecture.name.startswith(library.PREFIX):
            model: nn.Module = library.build(architecture)
            return model
    raise BadInput(
        f"family {architecture.family}: {architecture.name:.100} is built by no family of this name; write the model "
        "again"
    )


_BUILDERS: dict[str, Callable[[Architecture], nn.Module]] = {
    bert.NAME: bert.build,
    timm_library.NAME: timm_library.build,
    FAMILY: custom_modules.build,
    decoder.NAME: decoder.build,
    given_module.NAME: given_module.build,
    "traced": _of_library,
}
"""By the name that config.json has of the family: what builds models that are traced."""


def dense_model(architecture: Architecture) -> nn.Module:
    """The dense model with its initial weights, in eval mode, traced. Raises BadInput where it can't be built."""
    name = architecture.family
    if name not in _BUILDERS:
        raise BadInput(f"family {name[:100]!r}: expected one of {', '.join(_BUILDERS)}")
    model = _BUILDERS[name](architecture)
    return model if isinstance(model, TracedModule) else traced_model.traced(model, architecture)


def input_ports(model: nn.Module) -> tuple[Port, ...]:
    """What a model of any family takes, in the order in which it is called."""
    return traced_model.input_spec(model).ports


def outputs_of(model: nn.Module) -> Outputs | None:
    """The names of a model's outputs, None for one that gives its own."""
    return traced_model.facts_of(model).named


def gives_patches(model: nn.Module) -> bool:
    """Whether the last stream's patch tokens are what a model is for, as of one without classifier; which tokens
    outputs by name read its program tells.
    """
    return outputs_of(model) is None and traced_model.classes(model) == 0


def with_outputs(model: nn.Module, outputs: Outputs | None) -> nn.Module:
    """A copy of a dense model of any family that gives these outputs, itself for None. Raises BadInput for what it
    hasn't.
    """
    if outputs is None:
        return model
    assert isinstance(model, TracedModule), type(model)
    return with_named_maps(model, outputs)


def token_weights(model: nn.Module) -> TokenWeights:
    """How much each token of inputs counts, where there are as many."""

    def of_some(inputs: Inputs) -> PartialTokenWeights | None:
        weight_BN = traced_model.token_weights(model, inputs)
        return None if weight_BN is None else PartialTokenWeights(weight_BN=weight_BN)

    return of_some


def example_of(model: nn.Module) -> Inputs:
    """One input of zeros, as the model takes it and where it is; masks of ones, so that something is there."""
    ports = input_ports(model)
    tensors = batch_of_ports(ports, 1, device(model))
    return {port.name: each for port, each in zip(ports, tensors, strict=True)} if len(ports) > 1 else tensors[0]


def image_spec(model: nn.Module) -> ImageSpec:
    """How images become the model's input. Raises BadInput for a model that takes something else."""
    return _spec(model, ImageSpec)


def text_spec(model: nn.Module) -> TextSpec:
    """How each text becomes the model's input. Raises BadInput for a model that takes something else."""
    if sequence_spec(model) is not None:
        raise BadInput("the model takes one text as sequences of tokens, not each text for itself")
    return _spec(model, TextSpec)


def sequence_spec(model: nn.Module) -> SequenceSpec | None:
    """How one text becomes a decoder's inputs; None for a model that takes something else."""
    spec = traced_model.input_spec(model)
    return spec if isinstance(spec, SequenceSpec) else None


def array_ports(model: nn.Module) -> tuple[Port, ...]:
    """What a model takes as arrays. Raises BadInput for a model that takes something else."""
    return _spec(model, ArraySpec).ports


def _spec(model: nn.Module, kind: type[Spec]) -> Spec:
    spec = traced_model.input_spec(model)
    if not isinstance(spec, kind):
        raise BadInput(f"the model takes {spec.medium}, not {kind.medium}; give --{spec.medium}")
    return spec
