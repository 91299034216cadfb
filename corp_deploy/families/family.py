"""How a model is built by the family that config.json names, and what is told of it once it is traced.

Builders alone spell their library's names. What is done at a site is the business of the kind of site.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

from torch import Tensor, nn

from calib.inputs import Inputs
from calib.weights import PartialTokenWeights, TokenWeights
from ground.errors import BadInput
from ground.ports import OutputPort, Port

from . import (
    bert,
    decoder,
    given_module,
    timm_library,
    traced_model,
)
from .architecture import Architecture
from .array_inputs import batch_of_ports
from .modules import device
from .outputs import Outputs
from .protocols import Family, ImageSpec, InputSpec, Medium
from .site import Site
from .sites import Sites
from .steps import Step, StreamState
from .timm_maps import with_named_maps
from .tokenizer import SequenceSpec, TextSpec
from .traced_module import TracedModule
from .trusted_code import FAMILY

_BUILDERS: dict[str, Callable[[Architecture], nn.Module]] = {
    bert.NAME: bert.build,
    timm_library.NAME: timm_library.build,
    FAMILY: traced_model.build,
    decoder.NAME: decoder.build,
    given_module.NAME: given_module.build,
    traced_model.NAME: traced_model.build,
}
"""By the name that config.json has of the family: what builds models that are traced."""


def register(name: str, build: Callable[[Architecture], nn.Module]) -> None:
    """Make what builds the models of a family known; a later one takes the place of an earlier one of the name."""
    _BUILDERS[name] = build


def dense_model(architecture: Architecture) -> nn.Module:
    """The dense model with its initial weights, in eval mode, traced. Raises BadInput where it can't be built."""
    name = architecture.family
    if name not in _BUILDERS:
        raise BadInput(f"family {name[:100]!r}: expected one of {', '.join(_BUILDERS)}")
    model = _BUILDERS[name](architecture)
    return model if isinstance(model, TracedModule) else traced_model.traced(model, architecture)


def family_of(model: nn.Module) -> Family:
    """What tells of a model. Raises BadInput for one that was not traced."""
    if isinstance(model, TracedModule):
        return traced_model
    raise BadInput(
        f"model is {type(model).__name__}, expected one of corp_deploy.load, which traces it, or of "
        "corp_deploy.sites(...)"
    )


def sites_of(model: nn.Module) -> Sites:
    """The sites of a model of any family."""
    return family_of(model).sites(model)


def input_ports(model: nn.Module) -> tuple[Port, ...]:
    """What a model of any family takes, in the order in which it is called."""
    return family_of(model).input_spec(model).ports


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    """What a model of any family gives, in its order."""
    return family_of(model).output_ports(model)


def outputs_of(model: nn.Module) -> Outputs | None:
    """The names of a model's outputs, None for one that gives its own."""
    return traced_model.facts_of(model).named


def gives_patches(model: nn.Module) -> bool:
    """Whether the last stream's patch tokens are what a model is for, as of one without classifier; which tokens
    outputs by name read its program tells.
    """
    return outputs_of(model) is None and family_of(model).classes(model) == 0


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
    weights = partial(family_of(model).token_weights, model)

    def of_some(inputs: Inputs) -> PartialTokenWeights | None:
        weight_BN = weights(inputs)
        return None if weight_BN is None else PartialTokenWeights(weight_BN=weight_BN)

    return of_some


def listened(model: nn.Module) -> nn.Module:
    """What to run for the sites of a model to be heard: its program."""
    return traced_model.listened(model)


def has_uneven_heads(model: nn.Module) -> bool:
    """Whether queries and keys are of another width than values in any attention."""
    return traced_model.has_uneven_heads(model)


def layers_of(model: nn.Module, site: Site) -> dict[str, nn.Linear | nn.Conv2d]:
    """The linear layers and convolutions that have a site's weights, by name in the model."""
    return dict(traced_model.layers_of(model, site))


def steps_to_outputs(model: nn.Module) -> Iterator[Step]:
    """All steps of a model of any family, with outlets where outputs stand behind a layer."""
    return traced_model.steps_to_outputs(model)


def answers(model: nn.Module, walk: StreamState, inputs: Inputs) -> tuple[Tensor, ...]:
    """The outputs of a model of any family for what is behind the last of these steps."""
    return traced_model.answers(model, walk, inputs)


def example_of(model: nn.Module) -> Inputs:
    """One input of zeros, as the model takes it and where it is; masks of ones, so that something is there."""
    ports = input_ports(model)
    tensors = batch_of_ports(ports, 1, device(model))
    return {port.name: each for port, each in zip(ports, tensors, strict=True)} if len(ports) > 1 else tensors[0]


def image_spec(model: nn.Module) -> ImageSpec:
    """How images become the model's input. Raises BadInput for a model that takes something else."""
    return cast(ImageSpec, _spec(model, "images"))


def text_spec(model: nn.Module) -> TextSpec:
    """How each text becomes the model's input. Raises BadInput for a model that takes something else."""
    if sequence_spec(model) is not None:
        raise BadInput("the model takes one text as sequences of tokens, not each text for itself")
    return cast(TextSpec, _spec(model, "text"))


def sequence_spec(model: nn.Module) -> SequenceSpec | None:
    """How one text becomes a decoder's inputs; None for a model that takes something else."""
    spec = family_of(model).input_spec(model)
    return spec if isinstance(spec, SequenceSpec) else None


def array_ports(model: nn.Module) -> tuple[Port, ...]:
    """What a model takes as arrays. Raises BadInput for a model that takes something else."""
    return _spec(model, "arrays").ports


def known_numbers(model: nn.Module) -> Mapping[str, int]:
    """Of ports of ids how many there are, where the model's program tells."""
    return traced_model.known_numbers(model)


def _spec(model: nn.Module, medium: Medium) -> InputSpec:
    spec = family_of(model).input_spec(model)
    if spec.medium != medium:
        raise BadInput(f"the model takes {spec.medium}, not {medium}; give --{spec.medium}")
    return spec
