"""The seam: what a family of models has to tell, and which family a model is of.

A family is a file (or an object) with the functions of `seam.Told`; it alone spells its library's names. It says where
sites are and how the model is run, taken apart, built again and exported. What is done at a site is the business of the
kind of site.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

from torch import Tensor, nn

from calib.inputs import Inputs
from calib.weights import OfSomeTokens, TokenWeights
from ground.errors import BadInput
from ground.ports import OutputPort, Port

from . import (
    bert,
    decoder,
    own_modules,
    timm_vit,
    traced_model,
)
from .architecture import Architecture
from .array_inputs import batch_of_ports
from .modules import device
from .named_outputs import NamedOutputs, named
from .named_sites import NamedSites
from .outputs import Outputs
from .seam import Family, ImageSpec, InputSpec, Medium, TimmFamily, Told
from .site import Site
from .sites import Sites
from .steps import Step, Walk
from .timm_maps import with_named_maps
from .tokenizer import SequenceSpec, TextSpec
from .traced_module import TracedModule
from .usual import complete

_TIMMS: tuple[Told, ...] = (
    traced_model,
    timm_vit,
)
_OF_TIMM: tuple[TimmFamily, ...] = tuple(map(complete, _TIMMS))
_BUILT_IN: tuple[Family, ...] = (*_OF_TIMM, *map(complete, (decoder, own_modules)))
_FAMILIES: dict[str, Family] = {family.NAME: family for family in _BUILT_IN} | {bert.NAME: _OF_TIMM[0]}


def timm_family_of(model: nn.Module) -> TimmFamily:
    """The family of a model that timm built and one of them accepts."""
    return next(family for family in _OF_TIMM if family.accepts(model))


def register(family: Told) -> None:
    """Make a family known; a later one of the same name takes the place of an earlier one."""
    _FAMILIES[family.NAME] = complete(family)


def family_named(name: str) -> Family:
    """Raises BadInput for a name that no family has."""
    if name not in _FAMILIES:
        raise BadInput(f"family {name[:100]!r}: expected one of {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def dense_model(architecture: Architecture) -> nn.Module:
    """The dense model with its initial weights, in eval mode, of the family that accepts it, else to be traced. Raises
    BadInput where its family can't build it.
    """
    model = family_named(architecture.family).build(architecture)
    is_known = any(family.accepts(model) for family in _FAMILIES.values())
    return model if is_known else traced_model.traced(model, architecture)


def family_of(model: nn.Module) -> Family:
    """The family that accepts a model. Raises BadInput where none does."""
    for family in _FAMILIES.values():
        if family.accepts(model):
            return family
    raise BadInput(
        f"model is {type(model).__name__}, expected timm's VisionTransformer (ViT, DeiT, DeiT-III, DINO ViTs), "
        "a decoder (OPT, GPT-2, Llama, Mistral, Qwen2, Qwen3), or a model of corp_deploy.load, which traces others; "
        "or name its sites, with corp_deploy.sites(...)"
    )


def sites_of(model: nn.Module) -> Sites:
    """The sites of a model of any family."""
    return family_of(model).sites(model)


def input_ports(model: nn.Module) -> tuple[Port, ...]:
    """What a model of any family takes, in the order in which it is called."""
    return family_of(model).input_spec(model).ports


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    """What a model of any family gives, in its order."""
    return model.ports if isinstance(model, NamedOutputs) else family_of(model).output_ports(model)


def outputs_of(model: nn.Module) -> Outputs | None:
    """The names of a model's outputs, None for one that gives its own."""
    if isinstance(model, TracedModule):
        return traced_model.facts_of(model).named
    return model.named_outputs if isinstance(model, NamedOutputs) else None


def gives_patches(model: nn.Module) -> bool:
    """Whether the last stream's patch tokens are what a model is for: outputs by name, or of one without classifier.
    Which tokens outputs by name read of a traced model its program tells.
    """
    if isinstance(model, NamedOutputs):
        return model.has_last_patches
    return outputs_of(model) is None and family_of(model).classes(model) == 0


def with_outputs(model: nn.Module, outputs: Outputs | None) -> nn.Module:
    """A copy of a model of any family that gives these outputs, its own for None. Raises BadInput for what it
    hasn't.
    """
    if outputs is not None and isinstance(model, TracedModule):
        return with_named_maps(model, outputs)
    return named(model, family_of(model), outputs)


def token_weights(model: nn.Module) -> TokenWeights:
    """How much each token of inputs counts, for a model of any family; of a traced one where there are as many."""
    weights = partial(family_of(model).token_weights, model)

    def of_some(inputs: Inputs) -> OfSomeTokens | None:
        weight_BN = weights(inputs)
        return None if weight_BN is None else OfSomeTokens(weight_BN=weight_BN)

    return of_some if isinstance(model, TracedModule) else weights


def is_run_whole(model: nn.Module) -> bool:
    """Whether the layers of the model's sites are heard in a run of all of it: of those that their user named, or that
    were found.
    """
    return isinstance(model, NamedSites | TracedModule)


def listened(model: nn.Module) -> nn.Module:
    """What to run for the sites of a model of any family to be heard: itself, or its program."""
    return traced_model.listened(model) if isinstance(model, TracedModule) else model


def layers_of(model: nn.Module, site: Site) -> dict[str, nn.Linear | nn.Conv2d]:
    """The linear layers that have a site's weights, of a program convolutions too, by name in the model."""
    if isinstance(model, TracedModule):
        return dict(traced_model.layers_of(model, site))
    names = {id(module): name for name, module in model.named_modules()}
    layers = (layer for module in site.modules for layer in module.modules())
    return {names[id(layer)]: layer for layer in layers if isinstance(layer, nn.Linear)}


def steps_to_outputs(model: nn.Module) -> Iterator[Step]:
    """All steps of a model of any family, with outlets where outputs stand behind a layer."""
    if isinstance(model, TracedModule):
        return traced_model.steps_to_outputs(model)
    return model.steps() if isinstance(model, NamedOutputs) else family_of(model).steps(model)


def answers(model: nn.Module, walk: Walk, inputs: Inputs) -> tuple[Tensor, ...]:
    """The outputs of a model of any family for what is behind the last of these steps."""
    if isinstance(model, NamedOutputs):
        return model.answers(walk, inputs)
    if isinstance(model, TracedModule):
        return traced_model.answers(model, walk, inputs)
    return (family_of(model).finished(model, walk.tokens.x, inputs, walk.tokens.sources),)


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
    return traced_model.known_numbers(model) if isinstance(model, TracedModule) else {}


def _spec(model: nn.Module, medium: Medium) -> InputSpec:
    spec = family_of(model).input_spec(model)
    if spec.medium != medium:
        raise BadInput(f"the model takes {spec.medium}, not {medium}; give --{spec.medium}")
    return spec
