"""Named outputs of timm's models: tokens and maps that timm's `forward_intermediates` returns.

Legend: B images, N tokens, of which F precede those of the P positions of a map, C channels.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.spec.outputs import NamedOutput, NamedOutputs
from corp_deploy.traced.models.module import TracedModule, is_librarys, traced_module, traced_state
from corp_deploy.traced.programs.program import copy_to_meta
from ground.errors import BadInput
from ground.ports import OutputPort

from . import timm_library
from .plain_module import copy_with_forward

_NUMBERED = re.compile(r"([a-z]+?)s?\.?(\d+)(?:\.\d+(?:\..*)?)?")
_STAGES = ("stage", "layer", "s")  # models name the same stage stage1, layer1 or s1
KINDS = {"class": "class", "registers": "register"}  # the kind of token that an output of this part gives


def tokens_from_map(x_BCHW: Tensor) -> Tensor:
    """Return a map [B,C,H,W] as one token for each of its positions [B,HW,C]."""
    assert x_BCHW.ndim == 4, x_BCHW.shape
    return x_BCHW.flatten(2).mT


def tokens_of_kind(output: NamedOutput, x_BNC: Tensor, kinds: Sequence[str]) -> Tensor:
    """Return the class token [B,C], or the registers [B,N,C], of tokens that begin with these kinds."""
    kind = KINDS[output.part or ""]
    first, count = kinds.index(kind), kinds.count(kind)
    return x_BNC[:, first] if kind == "class" else x_BNC[:, first : first + count]


def refusal_of_part(output: NamedOutput, kinds: Sequence[str], *, has_norm: bool) -> str:
    """Return why tokens that begin with these kinds lack the part that an output gives; empty if they have it."""
    kind = KINDS.get(output.part or "")
    if kind is not None and kind not in kinds:
        every = ", ".join(dict.fromkeys((*kinds, "patch")))
        return f"the model has no {kind} token{' there' if output.layer else ''}; its tokens are {every}"
    needs_norm = output.layer and output.normed
    return "the model has no norm of tokens after its last layer" if needs_norm and not has_norm else ""


@dataclass(frozen=True, slots=True)
class _Stream:
    """A feature map and the tokens [B,F,C] that precede those of its positions, such as the class token, if any."""

    front_BFC: Tensor | None
    map_BCHW: Tensor

    @property
    def tokens_BNC(self) -> Tensor:
        places_BPC = tokens_from_map(self.map_BCHW)
        return places_BPC if self.front_BFC is None else torch.cat((self.front_BFC, places_BPC), dim=1)

    def part(self, output: NamedOutput, kinds: Sequence[str]) -> Tensor:
        """Return the part that `output` names: all tokens, patches, map, or one of the `kinds` of tokens in front."""
        if output.part == "tokens":
            return self.tokens_BNC
        if output.part in ("patches", "map"):
            return self.map_BCHW if output.part == "map" else tokens_from_map(self.map_BCHW)
        assert self.front_BFC is not None, output
        return tokens_of_kind(output, self.front_BFC, kinds)


def _named_tensors(
    model: Any, images: Tensor, numbers: Mapping[NamedOutput, int | None], kinds: Sequence[str]
) -> Tensor | tuple[Tensor, ...]:
    """Return the tensors of the outputs as a tuple, or the only one by itself.

    `numbers` has the stream of each output: None for the head's output, -1 for the head's input. `kinds` are those of
    the tokens in front.
    """
    last, streams = _streams(model, images)
    tensors = []
    for output, number in numbers.items():
        if number is None:
            tensors.append(model.forward_head(last))
            continue
        stream = streams[number] if number >= 0 else _last_stream(last, streams[-1].map_BCHW)
        if output.layer and output.normed:
            stream = _last_stream(model.norm(stream.tokens_BNC), stream.map_BCHW)
        tensors.append(stream.part(output, kinds))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _streams(model: Any, images: Tensor) -> tuple[Tensor, list[_Stream]]:
    """Return the features that the head reads, and the stream after each of timm's layers."""
    has_option = "return_prefix_tokens" in signature(model.forward_intermediates).parameters
    if not (has_option and model.num_prefix_tokens):  # without such tokens the option fails in some of timm's models
        last, maps = model.forward_intermediates(images, indices=None)
        return last, [_Stream(None, each) for each in maps]
    last, pairs = model.forward_intermediates(images, indices=None, return_prefix_tokens=True)
    return last, [_Stream(front, each) for each, front in pairs]


def _last_stream(features: Tensor, like_BCHW: Tensor) -> _Stream:
    """Return the head's input as a stream; it is a map [B,C,H,W], a map [B,H,W,C], or tokens [B,N,C]."""
    grid = like_BCHW.shape[2], like_BCHW.shape[3]
    if features.dim() == 3:
        front = features.shape[1] - grid[0] * grid[1]
        map_BCHW = features[:, front:].unflatten(1, grid).permute(0, 3, 1, 2)
        return _Stream(features[:, :front] if front else None, map_BCHW)
    is_last = features.shape[1:] == (*grid, like_BCHW.shape[1])
    return _Stream(None, features.permute(0, 3, 1, 2) if is_last else features)


def with_named_maps(model: TracedModule, outputs: NamedOutputs) -> TracedModule:
    """Return a copy of a dense model of timm that gives these outputs.

    Outputs are the head's, and tokens and maps after layers: `block1_class`, `stage1_map`, or by timm's numbers
    `feature1_map`; `stage1` has the map's places as tokens [B,HW,C]. Raises BadInput for an output that the model does
    not have.
    """
    if not is_librarys(model):
        of = "a model that isn't timm's: a module of your own declares them as its `outputs`"
        if traced_state(model).cut is not None:
            of = "a reduced model: name the outputs of the dense model"
        raise BadInput(f"outputs: {outputs.describe()} can't be named for {of}; leave --outputs out")
    layers = _read_layers(model)
    numbers = {each: _number(each, layers) for each in outputs.every}
    plain = copy_with_forward(model, lambda self, images: _named_tensors(self, images, numbers, layers.kinds))
    (own,) = timm_library.timm_output_ports(model)
    ports = [OutputPort(name=each.name, role=own.role) if each.part is None else each.port for each in outputs.every]
    own_classes = timm_library.class_count(model) if "logits" in outputs.names else 0
    facts = replace(timm_library.facts(model), outputs=tuple(ports), classes=own_classes, named=outputs)
    return traced_module(plain, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """The layers after which timm takes maps, in its order."""

    names: tuple[str, ...]
    channels: tuple[int, ...]
    kinds: tuple[str, ...]  # the kinds of the tokens in front of the last map's places
    is_in_front: tuple[bool, ...]  # whether each layer's map has these tokens in front of it too
    normed: int  # the number of channels of the model's last norm, 0 without one
    classes: int

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each layer, by the names that outputs may call it.

        Names come from the layer's own: stage1 for stages.1, layer1 or s1, and block1 where timm names the last module
        of blocks.1. feature1 is timm's number 1, also in models that have a module `features`.
        """
        matches = ((_NUMBERED.fullmatch(layer), number) for number, layer in enumerate(self.names))
        named = {match[1] + match[2]: number for match, number in matches if match and match[1] != "feature"}
        return named | {f"feature{number}": number for number in range(len(self.names))}


def _read_layers(model: nn.Module) -> _Layers:
    """Return the layers that give maps. Raises BadInput for a model whose maps timm doesn't give."""
    running, (height, width) = copy_to_meta(model), timm_library.configured_size(model)
    images = torch.empty(2, timm_library.channels(model), height, width, device="meta")
    try:
        info: Any = running.feature_info
        names = tuple(str(each["module"]) for each in (info if isinstance(info, list | tuple) else info.info))
        last, streams = _streams(running, images)
        end = _last_stream(last, streams[-1].map_BCHW)
    except Exception:  # timm's models without maps raise errors of many kinds
        names, streams = (), []
    if not names or [each.map_BCHW.dim() for each in streams] != [4] * len(names):
        raise BadInput(f"outputs: timm gives no feature maps of {type(model).__name__}; leave --outputs out")
    # The tokens in front, by timm's names of their parameters: class, then DeiT's distillation, then registers.
    named, count = dict(model.named_parameters(recurse=False)), 0 if end.front_BFC is None else end.front_BFC.shape[1]
    kinds = [kind for kind, name in (("class", "cls_token"), ("distillation", "dist_token")) if name in named][:count]
    # A model that applies its norm to pooled features has an identity here.
    is_normed = isinstance(dict(model.named_children()).get("norm"), nn.Identity | nn.LayerNorm)
    return _Layers(
        names=names,
        channels=tuple(each.map_BCHW.shape[1] for each in streams),
        kinds=(*kinds, *["register"] * (count - len(kinds))),
        is_in_front=tuple(each.front_BFC is not None for each in streams),
        normed=end.map_BCHW.shape[1] if is_normed else 0,
        classes=timm_library.class_count(model),
    )


def _number(output: NamedOutput, layers: _Layers) -> int | None:
    """Return an output's number as in `_named_tensors`. Raises BadInput for an output that the model does not have."""
    number, reason = None, ""
    if output.part is not None:
        word, _, digits = output.layer.partition("s.")
        accepted = (f"{word}{digits}", *(f"{each}{digits}" for each in _STAGES if word in ("stage", "layer")))
        numbers = layers.numbers
        number = next((numbers[name] for name in accepted if name in numbers), None) if output.layer else -1
        reason = _refusal(output, number, layers)
    elif output.name == "logits" and not layers.classes:
        reason = "the model has no classifier; its head gives pooled"
    elif output.name == "pooled" and layers.classes:
        reason = "the model's head gives logits; pooled is the output of one built with num_classes 0"
    if reason:
        raise BadInput(f"outputs: {output.name}: {reason}")
    return number


def _refusal(output: NamedOutput, number: int | None, layers: _Layers) -> str:
    if number is None:
        return f"the model has no such layer; it has {', '.join(layers.numbers)}"
    kinds = layers.kinds if number < 0 or layers.is_in_front[number] else ()
    if reason := refusal_of_part(output, kinds, has_norm=layers.normed > 0):
        return reason
    is_same = not (output.layer and output.normed) or layers.channels[number] == layers.normed
    return "" if is_same else "a stage's channels aren't those of the last norm"
