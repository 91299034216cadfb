"""Model directories: model.safetensors and config.json, read again without any repair and without pickled code.

config.json has the architecture, the widths of every reduced site, token merging, outputs, preprocessing and the
lineage: all that it takes to build the model again, and which inputs it was fitted to.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict
from safetensors.torch import save_file
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import dense_model, named_outputs_of, share_program_, with_outputs
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.traced.models.module import TracedModule, device_of, replace_submodules, traced_state
from corp_deploy.traced.models.narrowed_model import program_record, rebuild_narrowed, sites_record
from corp_deploy.traced.programs.threads import one_thread
from ground.errors import BadInput
from ground.files import sha256_of_file, write_json
from ground.records import record_from_value
from ground.transaction import replacing_files, roll_back_interrupted

from .model_config import CONFIG as CONFIG
from .model_config import KIND as KIND
from .model_config import REMEDY, load_model_config
from .weight_file import State, first_names
from .weight_fit import require_fit, require_sparse
from .weights import state_as_named

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHTS = "model.safetensors"
dense_from_architecture = dense_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model with its architecture and its lineage.

    `notes` are facts about its weights for the user who loaded it. `unread` has tensors of its file that are no part of
    the model. `sparsity` has the pattern, such as 2:4, of each sparse layer by name.
    """

    model: nn.Module
    architecture: Architecture
    lineage: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    unread: State = field(default_factory=dict)
    sparsity: Mapping[str, str] = field(default_factory=dict)


def on_device(checkpoint: Checkpoint, device: torch.device | str) -> Checkpoint:
    """Return the checkpoint with a copy of its model on a device, or itself where the model is on one of that type."""
    if device_of(checkpoint.model).type == torch.device(device).type:
        return checkpoint
    return replace(checkpoint, model=replace_submodules(checkpoint.model, {}).to(device))


@one_thread()
def load_weights(model: nn.Module, state: State, *, where: Path) -> None:
    """Set all weights of a model, floats as float32. Raises BadInput for other names, shapes, types, NaN and Inf."""
    require_fit(model, state, where)
    expected = model.state_dict()
    foreign = [
        f"{name} ({tensor.dtype})"
        for name, tensor in state.items()
        if expected[name].is_floating_point() != (tensor.dtype in FLOATS) or tensor.is_complex()
    ]
    if foreign:
        raise BadInput(f"{where}: {first_names(foreign)}: expected {', '.join(map(str, FLOATS))}; save them as such")
    cast = {name: tensor.float() if tensor.dtype in FLOATS else tensor for name, tensor in state.items()}
    broken = [name for name, tensor in cast.items() if not _is_finite(tensor)]
    if broken:
        raise BadInput(
            f"{where}: NaN or Inf in {first_names(broken)}, as float32; the checkpoint is damaged, its training "
            "diverged, or its numbers are beyond float32"
        )
    model.load_state_dict(_tied(model, cast), assign=True)
    model.requires_grad_(False)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor Inf, in one read and without tensors of its size as `isfinite`."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def _tied(model: nn.Module, state: State) -> State:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    one: State = {}
    for first, *others in names.values():
        if others and all(torch.equal(state[first], state[other]) for other in others):
            one = {**one, **dict.fromkeys((first, *others), nn.Parameter(state[first], requires_grad=False))}
    return {**state, **one}


def save(checkpoint: Checkpoint, directory: Path) -> None:
    """Write model.safetensors, a text model's tokenizer.json, and config.json, all or none; other files stay."""
    require_sparse(checkpoint.model, checkpoint.sparsity, str(directory / CONFIG))
    state = _apart(checkpoint.model.state_dict())
    beside = traced_model.extra_files(checkpoint.model)
    with replacing_files(directory, (WEIGHTS, *beside, CONFIG)) as (weights, *others, config):
        save_file(state, weights, metadata={"format": "pt"})
        for path, content in zip(others, beside.values(), strict=True):
            path.write_text(content, encoding="utf-8")
        write_json(config, _config_of(checkpoint, weights))


def _apart(state: State) -> dict[str, torch.Tensor]:
    """Return each tensor with memory of its own, also where one weight has two names."""
    storages, apart = set[int](), dict[str, torch.Tensor]()
    for name, tensor in state.items():
        is_first = tensor.untyped_storage().data_ptr() not in storages
        storages.add(tensor.untyped_storage().data_ptr())
        apart[name] = tensor.detach().contiguous() if is_first else tensor.detach().clone().contiguous()
    return apart


def _config_of(checkpoint: Checkpoint, weights: Path) -> dict[str, Any]:
    model, architecture = checkpoint.model, checkpoint.architecture
    assert isinstance(model, TracedModule), type(model)
    built = {"name": architecture.name, "kwargs": dict(architecture.kwargs)}
    spec, merging, outputs = traced_model.input_spec(model), traced_model.merging_of(model), named_outputs_of(model)
    entries = {
        "kind": KIND,
        "version": 1,
        **(
            {"timm": built} if architecture.family == "timm" else {"family": architecture.family, "architecture": built}
        ),
        "sites": sites_record(model),
        "program": program_record(model),
        "merging": None if merging is None else merging.as_json(),
        "outputs": None if outputs is None else list(outputs.names),
        "sparsity": dict(checkpoint.sparsity) or None,
        "input": {"shape": list(spec.shape), "preprocessing": spec.as_json()},
        "weights_sha256": sha256_of_file(weights),
        "lineage": dict(checkpoint.lineage),
    }
    return {key: value for key, value in entries.items() if value is not None}


@contextmanager
def _recorded_at(where: str) -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{where}: {error}; {REMEDY}") from None


def _fill_tables_(model: nn.Module, architecture: Architecture) -> None:
    """Set the buffers that no file has: tables that the model's library computes from its sizes."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    built = dense_from_architecture(architecture) if empty else model
    for name in empty:
        place, _, table = name.rpartition(".")
        setattr(model.get_submodule(place), table, built.get_buffer(name))


def load_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint that `save` wrote. Raises BadInput for a missing, foreign or damaged directory."""
    where = str(directory / CONFIG)
    roll_back_interrupted(directory)
    config = load_model_config(directory)
    weights = directory / WEIGHTS
    if not weights.is_file():
        raise BadInput(f"{weights}: no such file, but there is a {CONFIG} beside it; write the model again")
    if (digest := sha256_of_file(weights)) != config.weights_sha256:
        raise BadInput(
            f"{weights}: sha256 {digest[:16]}..., {CONFIG} says {config.weights_sha256[:16]}...; "
            "the weights were changed or cut off after they were written: write the model again"
        )
    built, prepared = config.built, f"{where}: input.preprocessing"
    recorded = record_from_value(config.input.preprocessing, Preprocessing, where=prepared)
    recorded = recorded.spread(config.input.shape[0]) if config.input.shape else recorded
    architecture = Architecture(name=built.name, kwargs=built.kwargs, preprocessing=recorded, family=config.family)
    with torch.device("meta"):
        model = dense_from_architecture(architecture)
    with _recorded_at(where):
        model = with_outputs(model, config.named_outputs)
    if config.program is not None:  # before weights are set
        assert isinstance(model, TracedModule), type(model)
        share_program_(model, architecture)
        model = rebuild_narrowed(model, config.sizes, config.kept, asdict(config.program), where=where)
    if config.merging is not None:
        with _recorded_at(f"{where}: merging"):
            model = traced_model.with_merging(model, config.merging.merging)
            traced_state(model).origin = None  # its weights are read later, and the merged model's alone
    load_weights(model, state_as_named(weights), where=weights)
    _fill_tables_(model, architecture)
    traced_model.load_extra_files_(model, directory)
    require_sparse(model, config.sparsity, where)
    return Checkpoint(
        model=model.eval(), architecture=architecture, lineage=config.lineage, sparsity=dict(config.sparsity)
    )
