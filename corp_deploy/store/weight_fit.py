"""Fit a state dict to a model: exactly, or through timm's own filter, with a notice of everything that was changed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp_deploy.families.timm_library import unused
from corp_deploy.families.traced_model import adapted_state
from corp_deploy.traced.models.module import counts_of_batches
from ground.errors import BadInput

from .weights import State, Weights, first_names

# Names that another library writes and timm's filter doesn't know, with what to do instead.
_FOREIGN = (
    (
        r"encoder_layer_\d+\.self_attention\.in_proj",
        "torchvision's VisionTransformer",
        "timm has no mapping of its names; give torchvision's name of the model: --model torchvision:vit_b_16",
    ),
    (
        r"^(features\.\d+\.(\d+\.)?(block|conv)|trunk_output)\.",
        "torchvision's convolutional networks",
        "timm has no mapping of its names; give torchvision's name of the model: --model torchvision:efficientnet_b0",
    ),
    (
        r"(attention\.(query|q_proj)|self_attn\.q_proj)\.(weight|bias)$",
        "Hugging Face transformers",
        "timm has no mapping of its names; give the directory that they are in: --model hf:DIR, or take timm's copy of "
        "these weights, which has the model's name under timm/",
    ),
    (
        r"^decoder_blocks\.\d+\.",
        "a masked autoencoder with its decoder",
        "give the encoder's weights, without decoder_* and mask_token",
    ),
)


def foreign_format(names: Mapping[str, Any]) -> str:
    """Which other library these names are of and what to do about it, or nothing."""
    for pattern, library, advice in _FOREIGN:
        match = next((name for name in names if re.search(pattern, name)), None)
        if match is not None:
            return f"these are the names of {library} ({match}): {advice}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Misfit:
    """How a state dict and a model differ."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def describe(self, state: State, expected: State) -> str:
        shapes = [f"{n} {tuple(state[n].shape)} instead of {tuple(expected[n].shape)}" for n in self.misshapen]
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("wrong shape", shapes))
        return "; ".join(f"{kind}: {first_names(list(names))}" for kind, names in kinds if names)


def _misfit(state: State, expected: State) -> _Misfit:
    common = sorted(expected.keys() & state.keys())
    return _Misfit(
        missing=tuple(sorted(expected.keys() - state.keys())),
        unexpected=tuple(sorted(state.keys() - expected.keys())),
        misshapen=tuple(name for name in common if state[name].shape != expected[name].shape),
    )


def _adapted(model: nn.Module, weights: Weights, misfit: str) -> dict[str, torch.Tensor]:
    try:
        return adapted_state(model, weights.state)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
        reason = str(error).partition("\n")[0][:150] or type(error).__name__
        raise BadInput(
            f"{weights.path}: these weights don't fit the model; {misfit}; nor can timm resample them ({reason}); "
            "check --model and --model-kwargs"
        ) from None


def _grid(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _sides(tensor: torch.Tensor) -> list[int]:
    """Without those of 1: a 1x1 convolution's weights are a linear layer's."""
    return [side for side in tensor.shape if side > 1]


def _notes(before: State, after: State) -> list[str]:
    """What timm's filter did, told by comparing names, shapes and memory."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in after.values()}
    renamed = sorted(after.keys() - before.keys())
    dropped = sorted(n for n in before.keys() - after.keys() if before[n].untyped_storage().data_ptr() not in kept)
    resized = [n for n in sorted(before.keys() & after.keys()) if _sides(before[n]) != _sides(after[n])]
    notes = [f"{name} resampled by timm from {_grid(before[name])} to {_grid(after[name])}" for name in resized]
    if renamed:
        notes.append(f"names mapped by timm to {first_names(renamed)}")
    if dropped:
        notes.append(f"not used: {first_names(dropped)}")
    return notes


def _advice(misfit: _Misfit, state: State, kwargs: Mapping[str, Any]) -> str:
    """The arguments that would make these weights fit, where they tell."""
    arguments: dict[str, Any] = {}
    if "head.weight" in misfit.misshapen:
        arguments["num_classes"] = state["head.weight"].shape[0]
    elif misfit.missing and all(name.startswith("head") for name in misfit.missing):
        arguments["num_classes"] = 0
    patches = "patch_embed.proj.weight"
    if patches in misfit.misshapen and state[patches].ndim == 4:
        arguments["in_chans"] = state[patches].shape[1]
    changed = {key: value for key, value in arguments.items() if kwargs.get(key) != value}
    if not changed:
        return "check --model and --model-kwargs"
    return f"give --model-kwargs '{json.dumps({**kwargs, **changed})}', or check --model"


def require_fit(model: nn.Module, state: State, where: Path) -> None:
    """Raise BadInput unless names and shapes are exactly the model's."""
    expected = model.state_dict()
    if misfit := _misfit(state, expected):
        words = misfit.describe(state, expected)
        raise BadInput(f"{where}: these weights don't fit the model beside them; {words}; write them again")


def fitted(model: nn.Module, weights: Weights, kwargs: Mapping[str, Any]) -> tuple[State, tuple[str, ...]]:
    """The weights under the model's names and shapes, and what was changed for that; `kwargs` built the model.

    Raises BadInput, with the arguments that would fit where they can be told, or naming another library's format.
    """
    expected, counts = model.state_dict(), counts_of_batches(model)
    with_counts = {**counts, **weights.state}
    before = _misfit(with_counts, expected)
    if not before:
        return with_counts, ()
    if foreign := foreign_format(weights.state):
        raise BadInput(f"{weights.path}: {foreign}")
    state = _adapted(model, weights, before.describe(with_counts, expected))
    notes = _notes(weights.state, state)
    state = {**counts, **state}
    without = [name for name in state if name not in expected and name.startswith(unused(model))]
    if without:
        state = {name: tensor for name, tensor in state.items() if name not in without}
        notes.append(f"not used, as the model was built without: {first_names(without)}")
    if misfit := _misfit(state, expected):
        raise BadInput(
            f"{weights.path}: these weights don't fit the model; {misfit.describe(state, expected)}; "
            f"{_advice(misfit, state, kwargs)}"
        )
    return state, tuple(f"{weights.path.name}: {note}" for note in notes)
