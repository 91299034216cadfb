"""Checkpoints of modules in memory: a library's module is rebuilt by its name, any other is copied."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from corp_deploy.families import given_module, hf_classes, timm_library, torchvision_models, traced_model
from corp_deploy.families.family import image_spec, input_ports
from corp_deploy.families.plain_module import require_module
from corp_deploy.families.timm_arguments import arguments_beside
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.traced.models.array_inputs import read_ports
from corp_deploy.traced.models.module import notes_on_module
from ground.errors import BadInput
from ground.quantity import quoted
from ground.records import record_from_value

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .dense_model import load_dense, with_weights
from .hub_snapshot import PREFIX
from .weights import Weights

WHERE = Path("the module")  # stands for the file of weights in notes and messages
IMAGES = 2
NOTHING: Mapping[str, Any] = MappingProxyType({})
MOST_APART = 1e-4  # relative to the outputs' norm; norms that are folded into convolutions round differently
INSTEAD = (
    "save its state_dict() with safetensors and give corp_deploy.Source(NAME, weights=FILE, kwargs={...}) with the "
    "arguments that it was made with, or the directory that it came from"
)
SAY = "for a module in memory: corp_deploy.Source(MODULE, kwargs={'input_size': (3, 32, 32)}), or {'inputs': {...}}"
OF_A_DIRECTORY = 'or save model and tokenizer with save_pretrained(DIR), and give "hf:DIR"'


def _of_timm(model: nn.Module, kwargs: Mapping[str, Any]) -> Checkpoint:
    """Rebuild timm's module by its name, with the arguments that its attributes show, overridden by `kwargs`."""
    settings = dict(getattr(model, "pretrained_cfg", None) or {})
    if not settings.get("architecture"):
        raise BadInput(f"model is {type(model).__name__}, which timm.create_model didn't make")
    own = record_from_value(settings, Preprocessing, where="model: its pretrained_cfg", remedy=INSTEAD)
    base = timm_library.input_and_classes(model, timm_library.made_size(model))
    architecture = Architecture(name=str(settings["architecture"]), kwargs={**base, **kwargs}, preprocessing=own)
    with torch.device("meta"):
        plain = dense_from_architecture(architecture)
    architecture = replace(architecture, kwargs={**base, **arguments_beside(model, plain), **kwargs})
    read = Weights(path=WHERE, state=_state(model))
    return with_weights(
        dense_from_architecture(architecture), architecture, read, Preprocessing(), lambda _: "the module's own"
    )


def _of_torchvision(model: nn.Module, kwargs: Mapping[str, Any]) -> Checkpoint:
    """Rebuild torchvision's module by the first name whose model has weights of the same names and shapes."""
    state = _state(model)
    shapes = {name: each.shape for name, each in state.items()}
    for name in torchvision_models.possible_names(model):
        architecture = torchvision_models.architecture_of_classifier(name, kwargs, Preprocessing(), state)
        with torch.device("meta"):
            theirs = dense_from_architecture(architecture).state_dict()
        if shapes == {name: each.shape for name, each in theirs.items()}:
            built = dense_from_architecture(architecture)
            load_weights(built, state, where=WHERE)
            return Checkpoint(model=built, architecture=architecture, lineage={"source": {"weights": WHERE.name}})
    raise BadInput(f"model is {type(model).__name__}, whose weights fit no name of torchvision's")


def _of_transformers(model: nn.Module, kwargs: Mapping[str, Any]) -> Checkpoint:
    if not hf_classes.is_theirs(model):
        raise BadInput(f"model is {type(model).__name__}, no model of transformers")
    with TemporaryDirectory() as scratch:
        hf_classes.save_pretrained(model, Path(scratch))
        try:
            return load_dense(f"{PREFIX}{scratch}", weights=None, kwargs=kwargs)
        except BadInput as error:
            raise BadInput(str(error).replace(scratch, str(WHERE))) from None


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def _answers(model: nn.Module, images_NCHW: Tensor) -> Tensor:
    try:
        answers: Any = model(images_NCHW)
    except Exception as error:
        raise BadInput(f"model can't be run on images {list(images_NCHW.shape)} ({error!s:.200})") from None
    answers = getattr(answers, "logits", answers)  # transformers'
    if not isinstance(answers, Tensor):
        raise BadInput(f"model gives {type(answers).__name__}, expected one tensor; {INSTEAD}")
    return answers


def _require_same(model: nn.Module, built: nn.Module) -> None:
    """Raise BadInput where `built`, rebuilt from `model`, gives other outputs on random images; skip other inputs."""
    if traced_model.input_spec(built).medium != "images":
        return
    images_NCHW = torch.randn(IMAGES, *image_spec(built).shape, generator=torch.Generator().manual_seed(0))
    where = next(model.parameters())
    was_training = model.training
    try:
        with torch.inference_mode():
            expected = _answers(model.eval(), images_NCHW.to(where)).float().cpu()
    finally:
        model.train(was_training)
    with torch.inference_mode():
        actual = _answers(built, images_NCHW)
    apart = (actual - expected).norm() / expected.norm() if actual.shape == expected.shape else torch.tensor(torch.inf)
    if not apart <= MOST_APART:
        raise BadInput(
            f"model: rebuilt by its name it gives other outputs (relative error {float(apart):.2g} on random "
            f"images), so it was made with arguments that the module does not record; {INSTEAD}"
        )


def _in_memory(model: nn.Module, input_args: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint of a traced copy of any module; its directory only loads together with the module."""
    if isinstance(declared := input_args.get("inputs"), Mapping):
        input_args = {"inputs": [asdict(port) for port in read_ports(model, declared)]}
    architecture = given_module.architecture_in_memory(model, input_args)
    try:
        with given_module.available_module(model):
            built = dense_from_architecture(architecture)
    except BadInput as error:
        theirs = f"; {OF_A_DIRECTORY}" if hf_classes.is_theirs(model) else ""
        raise BadInput(f"{error}; {SAY}{theirs}") from None
    load_weights(built, _state(built), where=WHERE)
    source = {"module": architecture.name}
    return Checkpoint(model=built, architecture=architecture, lineage={"source": source}, notes=notes_on_module(built))


def checkpoint_from_module(
    model: nn.Module, kwargs: Mapping[str, Any] = NOTHING, input_args: Mapping[str, Any] = NOTHING
) -> Checkpoint:
    """Return the checkpoint of a copy of a module.

    The copy is rebuilt by the module's library where that gives the same outputs, so that its directory loads without
    the module. `kwargs` are arguments that the module does not show, or the `input_size` or `inputs` of a module of no
    library; `input_args` are the latter for a module that does not declare them. Raises BadInput for arguments with
    which no library makes the module, and for a module that can't be run on its inputs.
    """
    require_module(model, "model: got")
    is_said = kwargs.keys() <= {"input_size", "inputs"}
    reasons = list[str]()
    for way in () if kwargs and is_said else (_of_timm, _of_torchvision, _of_transformers):
        try:
            return _rebuilt(model, partial(way, model), kwargs, input_args)
        except BadInput as error:
            reasons.append(str(error))
    if not is_said:
        reason = next((each for each in reasons if not each.startswith("model is ")), reasons[-1])
        raise BadInput(f"kwargs {quoted(str(dict(kwargs)))} don't make this module: {reason}; {INSTEAD}")
    declares = any(hasattr(model, name) for name in ("input_size", "inputs"))
    return _in_memory(model, kwargs or ({} if declares else input_args))


def _rebuilt(
    model: nn.Module,
    way: Callable[[Mapping[str, Any]], Checkpoint],
    kwargs: Mapping[str, Any],
    input_args: Mapping[str, Any],
) -> Checkpoint:
    """Return the checkpoint that `way` builds, at `input_args`' size if outputs agree there. Raises if none do."""
    found = way(kwargs)
    shape = tuple(input_args.get("input_size", ()))
    if shape and "img_size" not in kwargs and shape[1:] != input_ports(found.model)[0].shape[1:]:
        try:
            other = way({**kwargs, "img_size": list(shape[1:])})
            _require_same(model, other.model)
            return other
        except BadInput:
            pass  # images of a size that the module does not take are refused where they are read
    _require_same(model, found.model)
    return found
