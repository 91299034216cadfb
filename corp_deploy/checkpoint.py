"""A model as a directory: model.safetensors and config.json. Holds no pruning code and reads no pickle.

config.json names the timm architecture, the widths of every site that differs from it, the preprocessing, and the
lineage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from . import vit
from .errors import BadInput
from .files import read_json, replacing, sha256_of_file, write_json

KIND = "corp-deploy/model"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How timm builds the dense model: its name and keyword arguments."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model, how it was built, its preprocessing and what led to it."""

    model: nn.Module
    architecture: Architecture
    lineage: Mapping[str, Any]


def dense_from_architecture(architecture: Architecture) -> nn.Module:
    """The timm model with its initial weights, in eval mode. Raises BadInput for an unknown name or arguments."""
    try:
        model: nn.Module = timm.create_model(architecture.name, pretrained=False, **architecture.kwargs)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        close = timm.list_models(f"*{architecture.name[:12]}*")[:5]
        raise BadInput(
            f"--model {architecture.name!r} with arguments {dict(architecture.kwargs)}: timm can't build it ({error}); "
            f"names that look alike: {', '.join(close) or 'none'}; a directory written by corp-deploy works too"
        ) from None
    vit.parts(model)
    return model.eval()


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_weights(model: nn.Module, state: Mapping[str, torch.Tensor], *, where: Path) -> None:
    """Set every weight of a model this project made.

    Raises BadInput naming what is missing, unexpected or misshapen.
    """
    expected = model.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    misshapen = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name].shape
    ]
    faults = [
        f"{what}: {_first(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
        if names
    ]
    if faults:
        raise BadInput(
            f"{where}: these weights don't fit the model; {'; '.join(faults)}; check --model and --model-kwargs"
        )
    broken = [name for name in expected if not torch.isfinite(state[name]).all()]
    if broken:
        raise BadInput(f"{where}: NaN or Inf in {_first(broken)}; the checkpoint is damaged, or its training diverged")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    model.requires_grad_(False)


def _state_from_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BadInput(
            f"{path}: can't be read as a PyTorch checkpoint of plain tensors ({str(error).splitlines()[0][:150]}); "
            "(a) the file is damaged, or (b) it holds pickled code, which is never run: save its weights as safetensors"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise BadInput(
            f"{path}: expected a state_dict (names to tensors), got {type(loaded).__name__} with other content"
        )
    return {name.removeprefix("module."): tensor for name, tensor in loaded.items()}


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Weights from .safetensors, or .pth / .pt read with weights_only.

    Raises BadInput for a missing or damaged file.
    """
    if not path.is_file():
        raise BadInput(f"{path}: no such file, expected weights (.safetensors, .pth or .pt)")
    if path.suffix in (".pth", ".pt"):
        return _state_from_pickle(path)
    if path.suffix != ".safetensors":
        raise BadInput(f"{path}: weights of kind {path.suffix!r}, expected .safetensors, .pth or .pt")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"{path}: can't be read as safetensors ({error}); the file is truncated or of another kind"
        ) from None


def _widths_from_model(model: nn.Module) -> dict[str, dict[str, Any]]:
    found = vit.parts(model)
    widths: dict[str, dict[str, Any]] = {
        part.name: {
            "hidden": part.hidden,
            "input_bias": part.fc1.bias is not None,
            "output_bias": part.fc2.bias is not None,
        }
        for part in found.mlps
    }
    for part in found.attentions:
        widths[part.name] = {
            "heads": part.heads,
            "qk": part.qk,
            "v": part.v,
            "scale": part.scale,
            "geometry": part.geometry,
            "qkv_bias": part.qkv.bias is not None,
            "proj_bias": part.proj.bias is not None,
        }
    return widths


def save(checkpoint: Checkpoint, directory: Path) -> None:
    """Write model.safetensors, then config.json that carries its digest; other files there are left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous() for name, tensor in checkpoint.model.state_dict().items()}
    with replacing(directory / WEIGHTS) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})
    spec = vit.input_spec(checkpoint.model)
    write_json(
        directory / CONFIG,
        {
            "kind": KIND,
            "version": 1,
            "timm": {"name": checkpoint.architecture.name, "kwargs": dict(checkpoint.architecture.kwargs)},
            "sites": _widths_from_model(checkpoint.model),
            "input": {"shape": list(spec.shape), "preprocessing": spec.as_json()},
            "weights_sha256": sha256_of_file(directory / WEIGHTS),
            "lineage": dict(checkpoint.lineage),
        },
    )


def _resized(model: nn.Module, sites: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    """The dense model with every site brought to its recorded widths, weights not yet set."""
    found = vit.parts(model)
    modules: dict[str, nn.Module] = {}
    for mlp in found.mlps:
        hidden, output_bias = sites[mlp.name]["hidden"], sites[mlp.name]["output_bias"]
        input_bias = sites[mlp.name].get("input_bias", mlp.fc1.bias is not None)
        own = (mlp.hidden, mlp.fc1.bias is not None, mlp.fc2.bias is not None)
        if (hidden, input_bias, output_bias) != own:
            modules |= vit.empty_mlp(mlp, hidden=hidden, input_bias=input_bias, output_bias=output_bias)
    for part in found.attentions:
        width = {"qkv_bias": part.qkv.bias is not None, **sites[part.name]}
        wanted = {key: width[key] for key in ("qk", "v", "geometry", "qkv_bias", "proj_bias")}
        if tuple(wanted.values()) != (
            *(part.qk, part.v, part.geometry),
            *(part.qkv.bias is not None, part.proj.bias is not None),
        ):
            modules[part.name] = vit.empty_attention(part, **wanted)
    return vit.replaced(model, modules)


def load_checkpoint(directory: Path) -> Checkpoint:
    """Rebuild a saved model. Raises BadInput for a missing, foreign or damaged directory."""
    config = read_json(directory / CONFIG, kind=KIND)
    weights = directory / WEIGHTS
    if not weights.is_file():
        raise BadInput(f"{weights}: no such file, but {CONFIG} stands beside it; write the model again")
    if (found := sha256_of_file(weights)) != config["weights_sha256"]:
        raise BadInput(
            f"{weights}: sha256 {found[:16]}..., {CONFIG} says {config['weights_sha256'][:16]}...; "
            "the weights were changed or cut off after they were written: write the model again"
        )
    try:
        architecture = Architecture(name=config["timm"]["name"], kwargs=config["timm"]["kwargs"])
        with torch.device("meta"):
            model = _resized(dense_from_architecture(architecture), config["sites"])
    except KeyError as error:
        raise BadInput(
            f"{directory / CONFIG}: no entry {error}; the file was edited or cut off, write the model again"
        ) from None
    load_weights(model, read_state(weights), where=weights)
    return Checkpoint(model=model.eval(), architecture=architecture, lineage=config["lineage"])


def load_dense(model: str, *, weights: Path | None, kwargs: Mapping[str, Any]) -> Checkpoint:
    """A model from a directory written by `save`, or from a timm name with its weights.

    Raises BadInput when a name comes without weights (random weights are never reduced), or a directory with them.
    """
    directory = Path(model)
    if directory.is_dir():
        if weights is not None or kwargs:
            raise BadInput(
                f"--model {model} is a directory with its own weights and arguments; drop --weights and --model-kwargs"
            )
        return load_checkpoint(directory)
    architecture = Architecture(name=model, kwargs=kwargs)
    built = dense_from_architecture(architecture)
    if weights is None:
        raise BadInput(
            f"--model {model} is a timm name and needs --weights (.safetensors, .pth or .pt) of the trained model"
        )
    load_weights(built, read_state(weights), where=weights)
    return Checkpoint(model=built, architecture=architecture, lineage={})
