"""Dense models by their names: directories, snapshots of timm's repositories, and names of libraries with weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp_deploy.families import decoder, decoder_config, hf_classes, timm_library, torchvision_models, traced_model
from corp_deploy.families.family import image_spec, named_outputs_of, with_outputs
from corp_deploy.spec import trusted_code
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.spec.outputs import NamedOutputs
from ground.errors import BadInput
from ground.records import record_from_value

from .checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, load_weights
from .class_names import CLASS_NAMES, class_names_in
from .hub_snapshot import (
    CONFIG,
    PREFIX,
    config_of_directory,
    config_of_transformers,
    has_weights,
    is_ours,
    model_of_snapshot,
    refuse_beside_directory,
    weights_of_snapshot,
)
from .library_model import load_from_code, load_library_model
from .transformers_directory import decoder_arguments, encoder_architecture, load_decoder, load_transformers
from .weight_file import KINDS
from .weight_fit import fit_weights
from .weights import WeightChoice, Weights


def _resolved(architecture: Architecture, built: nn.Module) -> Architecture:
    """Return the architecture with the classes, image size, channels and preprocessing of the model `built`."""
    spec = image_spec(built)
    recorded = record_from_value(spec.as_json(), Preprocessing, where=architecture.name)
    kwargs = {**timm_library.input_and_classes(built, spec.shape[1:]), **architecture.kwargs}
    return Architecture(name=timm_library.architecture(built), kwargs=kwargs, preprocessing=recorded)


def _preprocessing_source(directory: Path | None, built: nn.Module, preprocessing: Preprocessing) -> str:
    tag = timm_library.pretrained_tag(built)
    source = f"{directory.name}/{CONFIG}" if directory else f"timm's tag {tag}" if tag else "timm's default"
    return f"{', '.join(preprocessing.settings)} as given, the rest from {source}" if preprocessing.settings else source


def _with_classes_of(
    built: nn.Module, architecture: Architecture, read: Weights
) -> tuple[nn.Module, Architecture, Weights]:
    """Return model, architecture and weights, rebuilt for the weights' class count with a note, unless one is given."""
    count, own = timm_library.count_classes(built, read.state), timm_library.class_count(built)
    if count in (None, own) or not own or "num_classes" in architecture.kwargs:
        return built, architecture, read
    note = f"{read.path.name}: tells {count} classes apart, where {architecture.name} has {own}: built with {count}"
    of_count = replace(architecture, kwargs={**architecture.kwargs, "num_classes": count})
    return dense_from_architecture(of_count), of_count, replace(read, notes=(*read.notes, note))


def with_weights(
    built: nn.Module,
    architecture: Architecture,
    read: Weights,
    preprocessing: Preprocessing,
    source: Callable[[nn.Module], str],
) -> Checkpoint:
    """Return the checkpoint of timm's model with these weights; `preprocessing` overrides that of `architecture`."""
    built, architecture, read = _with_classes_of(built, architecture, read)
    timm_library.set_preprocessing_(built, preprocessing.for_channels(image_spec(built).shape[0]))
    state, changed = fit_weights(built, read, architecture)
    load_weights(built, state, where=read.path)
    notes = (*read.notes, *changed)
    weights = {"weights": read.path.name, "taken": read.entry, "notes": list(notes)}
    return Checkpoint(
        model=built,
        architecture=_resolved(architecture, built),
        lineage={"source": {**weights, "preprocessing": source(built)}},
        notes=notes,
    )


def model_of_directory(directory: Path) -> Checkpoint:
    """Return the checkpoint of a directory that `save` wrote, or of a snapshot of one of timm's repositories."""
    return load_dense(str(directory), weights=None, kwargs={})


def _with_class_names(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    names = class_names_in(config, traced_model.classes(checkpoint.model))
    return replace(checkpoint, lineage={**checkpoint.lineage, CLASS_NAMES: names}) if names else checkpoint


def _refuse_beside(directory: Path, extra: Mapping[str, Any]) -> None:
    refuse_beside_directory(directory, {f"--{name.replace('_', '-')}": value for name, value in extra.items()})


def _is_decoder(directory: Path, preprocessing: Preprocessing) -> bool:
    """Return whether a directory of transformers has a decoder, else an encoder.

    Raises BadInput for a preprocessing of a decoder, a model that takes images of any size, and an unknown decoder.
    """
    config = config_of_transformers(directory)
    kind = config.get("model_type")
    if kind in decoder_config.MODEL_TYPES:
        _refuse_beside(directory, preprocessing.settings)
        return True
    if kind == "siglip2" or hf_classes.looks_like_decoder(config):
        naflex = "; its images are of any size (NaFlex): take a fixed resolution's" if kind == "siglip2" else ""
        model_types = ", ".join(decoder_config.MODEL_TYPES)
        raise BadInput(
            f"{directory / CONFIG}: model_type is {kind!r:.60}{naflex}; expected an encoder, or a decoder of "
            f"{model_types}"
        )
    return False


def load_dense(
    model: str,
    *,
    weights: Path | None,
    kwargs: Mapping[str, Any],
    ema: bool | None = None,
    key: str | None = None,
    preprocessing: Preprocessing | None = None,
    outputs: NamedOutputs | None = None,
) -> Checkpoint:
    """Return the checkpoint of a dense model by its name.

    `model` is a directory that `save` wrote, a snapshot of one of timm's repositories, a directory of transformers
    (`hf:DIR`), a function of a file (`module:PATH.py:FUNCTION`), or a name of torchvision or timm, which needs weights.
    `ema` and `key` are those of read_weights. `preprocessing` overrides that of the name or snapshot, `outputs` replace
    the model's own.

    Raises BadInput for a name without weights (random weights are never reduced), for options beside a directory that
    has them itself, and for outputs that the model does not have.
    """
    checkpoint = _loaded(model, WeightChoice(file=weights, ema=ema, key=key), kwargs, preprocessing or Preprocessing())
    own = named_outputs_of(checkpoint.model)
    if outputs is None or outputs == own:
        return checkpoint
    if own is not None:
        raise BadInput(
            f"--model {model} has outputs of its own: {own.describe()}; drop --outputs {','.join(outputs.names)}"
        )
    return replace(checkpoint, model=with_outputs(checkpoint.model, outputs))


def comes_with_weights(model: str) -> bool:
    """Return whether a name is `module:...`, a directory, or `hf:DIR` of a directory with weights."""
    if model.startswith(PREFIX):
        return has_weights(Path(model.removeprefix(PREFIX)))
    return model.startswith(trusted_code.PREFIX) or Path(model.removeprefix("local-dir:")).is_dir()


def load_without_weights(
    model: str, kwargs: Mapping[str, Any], preprocessing: Preprocessing, outputs: NamedOutputs | None
) -> Checkpoint:
    """Return the checkpoint of a model on the meta device, by a library's name or `hf:DIR`. Raises as `load_dense`."""
    if model.startswith(torchvision_models.PREFIX):
        architecture = torchvision_models.architecture_of_classifier(model, kwargs, preprocessing)
    elif model.startswith(PREFIX):
        directory = Path(model.removeprefix(PREFIX))
        if _is_decoder(directory, preprocessing):
            architecture = decoder.architecture_of_decoder(*decoder_arguments(directory, kwargs, looked_at=True))
        else:
            architecture = encoder_architecture(directory, kwargs, preprocessing)
    else:
        architecture = Architecture(name=model, kwargs=kwargs)
    with torch.device("meta"):
        built = dense_from_architecture(architecture)
    if model.startswith((torchvision_models.PREFIX, PREFIX)):
        source = "torchvision's" if model.startswith(torchvision_models.PREFIX) else f"the files beside {CONFIG}"
    else:
        timm_library.set_preprocessing_(built, preprocessing.for_channels(image_spec(built).shape[0]))
        architecture = _resolved(architecture, built)
        source = _preprocessing_source(None, built, preprocessing)
    lineage = {"source": {"preprocessing": source}}
    return Checkpoint(model=with_outputs(built, outputs), architecture=architecture, lineage=lineage)


def _loaded(model: str, choice: WeightChoice, kwargs: Mapping[str, Any], preprocessing: Preprocessing) -> Checkpoint:
    if model.startswith(torchvision_models.PREFIX):
        torchvision_models.require_classifier(model)
        if choice.file is None:
            raise BadInput(f"--model {model} needs --weights ({KINDS}) of the trained model")
        return load_library_model(model, choice.file, kwargs, choice, preprocessing)
    if model.startswith(trusted_code.PREFIX):
        return load_from_code(model, kwargs, choice, preprocessing)
    if model.startswith(PREFIX):
        directory = Path(model.removeprefix(PREFIX))
        _refuse_beside(directory, choice.settings)
        if _is_decoder(directory, preprocessing):
            checkpoint = load_decoder(directory, kwargs)
        else:
            checkpoint = load_transformers(directory, kwargs, preprocessing)
        return _with_class_names(checkpoint, config_of_transformers(directory))
    folder = Path(model.removeprefix("local-dir:"))
    snapshot = folder if folder.is_dir() else None
    architecture, file, config = Architecture(name=model), choice.file, dict[str, Any]()
    if snapshot is not None:
        config = config_of_directory(snapshot)
        if is_ours(config):
            _refuse_beside(snapshot, {**choice.settings, "model_kwargs": kwargs, **preprocessing.settings})
            return load_checkpoint(snapshot)
        name, own_kwargs, own = model_of_snapshot(snapshot, config)
        architecture = Architecture(name=name, kwargs=own_kwargs, preprocessing=own)
        file = choice.file or weights_of_snapshot(snapshot)
    requested = replace(architecture, kwargs={**architecture.kwargs, **kwargs})
    built = dense_from_architecture(requested)
    if file is None:
        raise BadInput(
            f"{model} is a timm name and needs --weights ({KINDS}) of the trained model; or give in its place a file "
            "that says both: the .model.toml that calibrate writes, or a recipe"
        )
    checkpoint = with_weights(
        built,
        requested,
        choice.read(file, built.state_dict().keys()),
        preprocessing,
        lambda model: _preprocessing_source(snapshot, model, preprocessing),
    )
    return _with_class_names(checkpoint, config)
