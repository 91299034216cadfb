"""A model as a directory: model.safetensors and config.json. Holds no pruning code and runs no pickled code.

config.json names the timm architecture, the widths of every site that differs from it, the preprocessing, and the
lineage: all that it takes to build the model again, wherever it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import nn

from corp_deploy.families import timm_vit as vit
from corp_deploy.families.preprocessing import Preprocessing, preprocessing_from_json
from ground.errors import BadInput
from ground.files import read_json, replacing, sha256_of_file, write_json
from ground.quantity import shown

from .hub_snapshot import CONFIG as CONFIG
from .model_arguments import MOST_PARAMETERS, refuse_unbounded
from .model_config import model_config_from_json
from .model_names import look_alikes, refuse_reserved, require_local_name
from .weight_fit import require_fit
from .weights import State, first_names, read_weights

KIND = "corp-deploy/model"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How timm builds the dense model: its name and keyword arguments; and what of its preprocessing is set."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model, how it was built, its preprocessing and what led to it.

    `notes`: what whoever loaded it should hear about its weights.
    """

    model: nn.Module
    architecture: Architecture
    lineage: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def on_device(checkpoint: Checkpoint, device: torch.device | str) -> Checkpoint:
    """The checkpoint with its model there: itself where it is there already, else with a copy of the model."""
    if vit.device(checkpoint.model).type == torch.device(device).type:
        return checkpoint
    return replace(checkpoint, model=vit.replaced(checkpoint.model, {}).to(device))


def _built(architecture: Architecture) -> nn.Module:
    """The model on torch's default device. Any error is one of the arguments: timm checks few of them."""
    try:
        model: nn.Module = timm.create_model(architecture.name, pretrained=False, **architecture.kwargs)
    except MemoryError:
        raise
    except Exception as error:
        raise BadInput(
            f"--model {shown(architecture.name)} with arguments {shown(str(dict(architecture.kwargs)))}: timm can't "
            f"build it ({type(error).__name__}: {str(error)[:300]}); {look_alikes(architecture.name)}; "
            "a directory written by corp-deploy works too"
        ) from None
    return model


def dense_from_architecture(architecture: Architecture) -> nn.Module:
    """The timm model with its initial weights, in eval mode. Raises BadInput for an unknown name or arguments.

    Nothing is looked for on a network.
    """
    require_local_name(architecture.name)
    refuse_reserved(architecture.kwargs)
    refuse_unbounded(architecture.kwargs)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in _built(architecture).parameters())
    if parameters > MOST_PARAMETERS:
        raise BadInput(
            f"--model {shown(architecture.name)} with these arguments has {parameters:,} parameters, "
            f"{MOST_PARAMETERS:,} at most are built; check --model-kwargs"
        )
    model = _built(architecture)
    vit.sites(model)
    vit.set_preprocessing_(model, architecture.preprocessing)
    return model.eval()


def load_weights(model: nn.Module, state: State, *, where: Path) -> None:
    """Set every weight of a model from a state dict of the same names and shapes.

    Raises BadInput for weights that are no real floating numbers, and for what is not finite as float32.
    """
    expected = model.state_dict()
    foreign = [
        f"{name} ({tensor.dtype})"
        for name, tensor in state.items()
        if expected[name].is_floating_point() != (tensor.dtype in FLOATS) or tensor.is_complex()
    ]
    if foreign:
        raise BadInput(f"{where}: {first_names(foreign)}: expected {', '.join(map(str, FLOATS))}; save them as such")
    cast = {name: tensor.float() if tensor.dtype in FLOATS else tensor for name, tensor in state.items()}
    broken = [name for name, tensor in cast.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise BadInput(
            f"{where}: NaN or Inf in {first_names(broken)}, as float32; the checkpoint is damaged, its training "
            "diverged, or its numbers are beyond float32"
        )
    model.load_state_dict(cast, assign=True)
    model.requires_grad_(False)


def _widths_from_model(model: nn.Module) -> dict[str, dict[str, Any]]:
    found = vit.sites(model)
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
    found = vit.sites(model)
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
    where = str(directory / CONFIG)
    config = model_config_from_json(read_json(directory / CONFIG, kind=KIND), where=where)
    weights = directory / WEIGHTS
    if not weights.is_file():
        raise BadInput(f"{weights}: no such file, but {CONFIG} stands beside it; write the model again")
    if (found := sha256_of_file(weights)) != config.weights_sha256:
        raise BadInput(
            f"{weights}: sha256 {found[:16]}..., {CONFIG} says {config.weights_sha256[:16]}...; "
            "the weights were changed or cut off after they were written: write the model again"
        )
    try:
        recorded = preprocessing_from_json(config.preprocessing, where=where)
        architecture = Architecture(name=config.name, kwargs=config.kwargs, preprocessing=recorded)
        with torch.device("meta"):
            model = _resized(dense_from_architecture(architecture), config.sites)
    except KeyError as error:
        raise BadInput(f"{where}: no entry {error}; the file was edited or cut off, write the model again") from None
    read = read_weights(weights)
    require_fit(model, read)
    load_weights(model, read.state, where=weights)
    return Checkpoint(model=model.eval(), architecture=architecture, lineage=config.lineage)
