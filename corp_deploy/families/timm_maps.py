"""Named outputs of timm's models that no family reads: maps as timm itself takes them, by `forward_intermediates`."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.traced.programs.twins import without_memory
from ground.errors import BadInput
from ground.ports import OutputPort

from . import timm_library
from .maps import map_from_tokens, tokens_from_map
from .named_outputs import refusal_of_head
from .outputs import Output, Outputs
from .traced_module import Facts, TracedModule, known_of, traced_module

_NUMBERED = re.compile(r"([a-z]+?)s?\.?(\d+)(?:\.\d+(?:\..*)?)?")
_STAGES = ("stage", "layer", "s")  # what some call stages others call layers, layer1 or s1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """By number the map that is each output: None for the head's own, -1 for what the head reads."""

    outputs: tuple[Output, ...]
    numbers: tuple[int | None, ...]

    def of(self, model: Any, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One output bare, several as a tuple."""
        last, maps = model.forward_intermediates(images, indices=None)
        given = []
        for output, number in zip(self.outputs, self.numbers, strict=True):
            if number is None:
                given.append(model.forward_head(last))
            else:
                x_BCHW = maps[number] if number >= 0 else _last_map(last, maps[-1])
                given.append(x_BCHW if output.part == "map" else tokens_from_map(x_BCHW))
        return given[0] if len(given) == 1 else tuple(given)


def _last_map(features: Tensor, like_BCHW: Tensor) -> Tensor:
    """The features that the head reads [B,C,H,W]: a map, one with channels last, or tokens of a map with others in
    front.
    """
    grid = like_BCHW.shape[2], like_BCHW.shape[3]
    if features.dim() == 3:
        return map_from_tokens(features[:, features.shape[1] - grid[0] * grid[1] :], grid)
    return features.permute(0, 3, 1, 2) if features.shape[1:] == (*grid, like_BCHW.shape[1]) else features


def with_named_maps(model: TracedModule, outputs: Outputs) -> TracedModule:
    """A copy of a dense model that gives these outputs: its head's, and maps behind its layers, `stage1_map`, or by
    timm's numbers, `feature1_map`; `stage1` for the map's places as tokens [B,HW,C]. Raises BadInput for what it hasn't
    got.
    """
    known = known_of(model)
    if known.facts is not None or known.cut is not None:
        of = (
            "a reduced model: those are named where it is dense"
            if known.cut is not None
            else ("a model that isn't timm's: a module of your own says them itself, as its `outputs`")
        )
        raise BadInput(f"outputs: {outputs.words()} can't be named of {of}; leave --outputs away")
    layers = _layers(model)
    given = _Given(outputs=outputs.every, numbers=tuple(_number(each, model, layers) for each in outputs.every))
    kind: type[nn.Module] = type(
        known.plain.__name__,
        (known.plain,),
        {"forward": lambda self, images: given.of(self, images), "__module__": known.plain.__module__},
    )
    plain = kind.__new__(kind)
    plain.__dict__ |= copy.deepcopy({key: value for key, value in vars(model).items() if key != "known_to_corp_deploy"})
    (own,) = timm_library.output_ports(model)
    ports = [OutputPort(name=each.name, role=own.role) if each.part is None else each.port for each in outputs.every]
    facts = Facts(
        spec=timm_library.image_spec(model, timm_library.configured_size(model)),
        outputs=tuple(ports),
        classes=timm_library.classes(model) if "logits" in outputs.names else 0,
        named=outputs,
    )
    return traced_module(plain, facts)


def _layers(model: nn.Module) -> tuple[str, ...]:
    """The modules behind which timm takes maps, in its order. Raises BadInput where it takes none."""
    running, (height, width) = without_memory(model), timm_library.configured_size(model)
    images = torch.empty(2, timm_library.channels(model), height, width, device="meta")
    try:
        info: Any = running.feature_info
        names = tuple(str(each["module"]) for each in (info if isinstance(info, list | tuple) else info.info))
        last, maps = running.forward_intermediates(images)  # type: ignore[operator]
        _last_map(last, maps[-1])
    except Exception:  # of whatever kind timm's code raises where it takes none
        names, maps = (), ()
    if not names or [each.dim() for each in maps] != [4] * len(names):
        raise BadInput(f"outputs: timm takes no maps of {type(model).__name__}; leave --outputs away")
    return names


def _number(output: Output, model: nn.Module, layers: Sequence[str]) -> int | None:
    """Of a map, None of the head's output. Raises BadInput for what the model hasn't."""
    if output.part is None:
        reason = refusal_of_head(output, timm_library.classes(model))
    elif output.part not in ("map", "patches") or (output.layer and output.normed):
        reason = "of a traced model maps and their places are known, neither class tokens nor norms behind layers"
    elif not output.layer:
        return -1
    else:
        names = {**_names(layers), **{f"feature{number}": number for number in range(len(layers))}}
        word, _, digits = output.layer.partition("s.")
        asked = (f"{word}{digits}", *(f"{each}{digits}" for each in _STAGES if word in ("stage", "layer")))
        found = next((names[name] for name in asked if name in names), None)
        if found is not None:
            return found
        reason = f"the model has no such layer; it has {', '.join(names)}"
    if reason:
        raise BadInput(f"outputs: {output.name}: {reason}")
    return None


def _names(layers: Sequence[str]) -> Mapping[str, int]:
    """Numbers of layers by their own names as outputs say them: stage1 for stages.1, layer1, s1; block1 where timm
    names the last of blocks.1. Those of `features` stand for timm's numbers alone.
    """
    matches = ((_NUMBERED.fullmatch(layer), number) for number, layer in enumerate(layers))
    return {match[1] + match[2]: number for match, number in matches if match and match[1] != "feature"}
