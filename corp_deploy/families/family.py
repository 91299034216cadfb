"""Dense models of any family: builders, input specs, named outputs, shared programs, and options that fit no site.

Only builders use the names of a library's models and layers; work at a site depends on the kind of site.

Models with equal keys share one program, which is traced once in a process. A key has the architecture, the named
outputs, and the settings that libraries read while they build and run a model. Only models that installed libraries
build by name share programs, since a user's code can change between two loads. No tensor with values is shared.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
from torch import nn

from calib.inputs import Inputs
from calib.products import PartialTokenWeights, TokenWeights
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.outputs import NamedOutputs
from corp_deploy.spec.trusted_code import FAMILY
from corp_deploy.traced.models.array_inputs import ArraySpec, build_plain_batch
from corp_deploy.traced.models.module import TracedModule, Tracing, device_of, traced_state, tracing
from corp_deploy.traced.models.sites import Sites
from ground.errors import BadInput
from ground.ports import Port

from . import decoder, given_module, hf_encoders, timm_library, torchvision_models, traced_model
from .hf_tokens import with_named_tokens
from .timm_images import ImageSpec
from .timm_maps import with_named_maps
from .tokenizer import SequenceSpec, TextSpec
from .traced_model import output_ports as output_ports
from .traced_model import sites_of as sites_of

Spec = TypeVar("Spec", ImageSpec, TextSpec, ArraySpec)


def _build_from_library(architecture: Architecture) -> nn.Module:
    if architecture.name.startswith(hf_encoders.PREFIX):
        return hf_encoders.build_encoder(architecture)
    if architecture.name.startswith(torchvision_models.PREFIX):
        return torchvision_models.build_classifier(architecture)
    raise BadInput(
        f"family {architecture.family}: {architecture.name:.100} has no builder in this family; write the model again"
    )


_BUILDERS: dict[str, Callable[[Architecture], nn.Module]] = {
    timm_library.NAME: timm_library.build_timm_model,
    FAMILY: given_module.build_from_code,
    decoder.NAME: decoder.build_decoder,
    given_module.NAME: given_module.build_in_memory,
    hf_encoders.FAMILY: _build_from_library,
}
"""The function that builds a family's dense models, by the family's name in config.json."""


def builds_installed_code(architecture: Architecture) -> bool:
    """Return whether this package or an installed library builds the model, and no code of the user's."""
    if architecture.family == timm_library.NAME:
        return timm_library.is_installed(architecture.name)
    return architecture.family in (decoder.NAME, hf_encoders.FAMILY)


def dense_model(architecture: Architecture) -> nn.Module:
    """Return the traced dense model with its initial weights, in eval mode. Raises BadInput where it can't be built."""
    name = architecture.family
    if name not in _BUILDERS:
        raise BadInput(f"family {name[:100]!r}: expected one of {', '.join(_BUILDERS)}")
    model = _BUILDERS[name](architecture)
    return model if isinstance(model, TracedModule) else traced_model.trace_model(model, architecture)


def input_ports(model: nn.Module) -> tuple[Port, ...]:
    """Return the ports of a model's inputs, in the order in which it takes them."""
    return traced_model.input_spec(model).ports


def named_outputs_of(model: nn.Module) -> NamedOutputs | None:
    """Return the outputs that were named by the user, or None."""
    return traced_model.facts_of(model).named


def gives_patches(model: nn.Module) -> bool:
    """Return whether a model has neither a classifier nor named outputs, so that its output counts as patch tokens."""
    return named_outputs_of(model) is None and traced_model.classes(model) == 0


def with_outputs(model: nn.Module, outputs: NamedOutputs | None) -> nn.Module:
    """Return a copy of a dense model with `outputs`, or the model for None. Raises BadInput for one that it lacks."""
    if outputs is None:
        return model
    assert isinstance(model, TracedModule), type(model)
    state = traced_state(model)
    is_theirs = state.cut is None and state.plain.__module__.startswith("transformers.")
    return with_named_tokens(model, outputs) if is_theirs else with_named_maps(model, outputs)


def token_weigher(model: nn.Module) -> TokenWeights:
    """Return the function inputs -> weights [B,N] of tokens, 0 for padding; None unless there is just one mask."""

    def of_some(inputs: Inputs) -> PartialTokenWeights | None:
        weight_BN = traced_model.token_weights(model, inputs)
        return None if weight_BN is None else PartialTokenWeights(weight_BN=weight_BN)

    return of_some


def example_of(model: nn.Module) -> Inputs:
    """Return a batch of one input on the model's device: zeros, masks of ones; by port name if there are several."""
    ports = input_ports(model)
    tensors = build_plain_batch(ports, 1, device_of(model))
    return {port.name: each for port, each in zip(ports, tensors, strict=True)} if len(ports) > 1 else tensors[0]


def image_spec(model: nn.Module) -> ImageSpec:
    """Return the spec of a model's images. Raises BadInput for a model that takes something else."""
    return _spec(model, ImageSpec)


def text_spec(model: nn.Module) -> TextSpec:
    """Return the spec of an encoder's texts. Raises BadInput for a model that takes something else."""
    if sequence_spec(model) is not None:
        raise BadInput("the model takes one text as sequences of tokens, not each text for itself")
    return _spec(model, TextSpec)


def sequence_spec(model: nn.Module) -> SequenceSpec | None:
    """Return the spec of a decoder's sequences; None for a model that takes something else."""
    spec = traced_model.input_spec(model)
    return spec if isinstance(spec, SequenceSpec) else None


def array_ports(model: nn.Module) -> tuple[Port, ...]:
    """Return the ports of a model's arrays. Raises BadInput for a model that takes something else."""
    return _spec(model, ArraySpec).ports


def _spec(model: nn.Module, kind: type[Spec]) -> Spec:
    spec = traced_model.input_spec(model)
    if not isinstance(spec, kind):
        raise BadInput(f"the model takes {spec.medium}, not {kind.medium}; give --{spec.medium}")
    return spec


MLPS, HEADS, CONVOLUTIONS = "channels", "heads", "convolutions"
_NOUNS: Mapping[str, str] = {MLPS: "MLPs", CONVOLUTIONS: "channels between convolutions", HEADS: "attention"}
"""The noun for the sites of a kind in messages."""
STREAMS = "traced streams"
OPTION_KINDS: Mapping[str, str] = {
    "traced channels": MLPS,
    "traced convolutions": CONVOLUTIONS,
    "traced queries and keys": HEADS,
    STREAMS: CONVOLUTIONS,
    "traced values": HEADS,
}
"""The kind of options that apply to each kind of site found in a program."""


def kinds_of(model: nn.Module) -> frozenset[str]:
    """Return the kinds of options that apply to a model's sites, reducible or not."""
    return frozenset(OPTION_KINDS[kind] for kind in sites_of(model).kinds)


def taps_for(sites: Sites, kind: str) -> frozenset[str]:
    """Return the names of taps (layers whose activations are observed) that only sites with these options need."""
    taps = [(OPTION_KINDS[site.kind], tap.name) for site in sites.every for tap in site.listening()]
    return frozenset(name for _, name in taps) - {name for other, name in taps if other != kind}


def require_streams(sites: Sites, name: str) -> None:
    """Raise BadInput for a model none of whose sites is a residual stream, to which --residual applies."""
    if STREAMS not in sites.kinds:
        raise BadInput(f"--residual: no stream of this model ({name}) has channels that can be removed")


def refuse_idle_options(model: nn.Module, kind: str, options: Mapping[str, object]) -> None:
    """Raise BadInput for an option of this kind where the model has no site that it applies to.

    `options` are values by names; None and False stand for options that were not given.
    """
    kinds = kinds_of(model)
    if kind in kinds:
        return
    for name, value in options.items():
        if value is not None and value is not False:
            shown = name if value is True else f"{name} {value}"
            there = ", ".join(_NOUNS[each] for each in sorted(kinds)) or "no sites"
            raise BadInput(
                f"{shown} has no effect on a model without {_NOUNS[kind]} ({type(model).__name__}, which has "
                f"{there}); leave it out"
            )


MOST_PROGRAMS = 4  # the number of programs that a process keeps, the last used ones


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """The values that determine a program; `model`, which equality ignores, is traced if no equal key has a program."""

    architecture: str
    outputs: tuple[str, ...] | None
    settings: tuple[object, ...]
    model: TracedModule = field(compare=False)


def _key(model: TracedModule, architecture: Architecture) -> _Key | None:
    """Return the key of a model's program, or None where the program is not shared."""
    if not (builds_installed_code(architecture) and _is_without_numbers(model)):
        return None
    try:
        text = json.dumps(asdict(architecture), sort_keys=True)
    except TypeError:  # code among the arguments
        return None
    named = named_outputs_of(model)
    settings = (torch.get_default_dtype(), *timm_library.settings())
    return _Key(architecture=text, outputs=None if named is None else named.names, settings=settings, model=model)


def _is_without_numbers(module: nn.Module) -> bool:
    return all(each.is_meta for each in (*module.parameters(), *module.buffers()))


@lru_cache(maxsize=MOST_PROGRAMS)
def _traced(key: _Key) -> Tracing | None:
    """Return the tracing of a key's model, or None where its program has constants with values."""
    own = tracing(key.model)
    return own if _is_without_numbers(own.program.graph) else None


def share_program_(model: TracedModule, architecture: Architecture) -> None:
    """Set the tracing of a dense model on meta to the one that models of its key share; do nothing without a key."""
    key = _key(model, architecture)
    own = None if key is None else _traced(key)
    if own is not None:
        traced_state(model).tracing = own.again()
