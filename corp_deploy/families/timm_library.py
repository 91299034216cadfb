"""timm's models: their builder, configurations, inputs and outputs, state dicts and norms."""

import json
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec
import timm
import torch
from timm import layers
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.traced.models.module import MOST_PARAMETERS, Facts, parameters
from corp_deploy.traced.programs.exported import Norm
from export.graph.precision import NORMS as TORCH_NORMS
from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort
from ground.quantity import quoted
from ground.records import record_from_value

from .plain_module import plain_class
from .timm_arguments import build_from_arguments, refuse_unbounded
from .timm_images import BY_CHANNEL, ImageSpec
from .timm_names import look_alikes, refuse_reserved, require_local_name

NAME = "timm"
State = Mapping[str, Tensor]
_Size = Annotated[int, msgspec.Meta(ge=1, le=16_384)]


class _Configured(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a pretrained_cfg that are read, beside its preprocessing."""

    input_size: tuple[_Size, _Size, _Size]
    classifier: str | tuple[str, ...] | None = None


def _config(model: Any) -> dict[str, Any]:
    return dict(model.pretrained_cfg)


def architecture(model: nn.Module) -> str:
    """Return timm's name of the model as it was built, without its tag."""
    return str(_config(model).get("architecture") or "")


def pretrained_tag(model: nn.Module) -> str:
    """Return the tag whose configuration timm took for the model's name; empty for a name without tags."""
    return str(_config(model).get("tag") or "")


def class_count(model: Any) -> int:
    """Return the number of classes; 0 for a model without a classifier."""
    return int(model.num_classes)


def channels(model: Any) -> int:
    return int(model.in_chans)


def configured_size(model: nn.Module) -> tuple[int, int]:
    """Return height and width of the configured images, also of a model that takes images of any size."""
    _, height, width = _config(model)["input_size"]
    return int(height), int(width)


def made_size(model: nn.Module) -> tuple[int, int]:
    """Return height and width of the images that a module's patch embedding was built for, else the configured ones."""
    size: Any = getattr(dict(model.named_children()).get("patch_embed"), "img_size", None)
    return configured_size(model) if size is None else (int(size[0]), int(size[1]))


def configured_image_spec(model: nn.Module, size: tuple[int, int]) -> ImageSpec:
    """Return the spec of images of this height and width, with the preprocessing of timm's data config."""
    shape = (channels(model), *size)
    return ImageSpec(shape=shape, config=timm.data.resolve_model_data_config(model) | {"input_size": shape})


def input_and_classes(model: nn.Module, size: tuple[int, int]) -> dict[str, Any]:
    """Return num_classes, img_size and in_chans if not 3; with 3, also an overlay of mean and std of other channels."""
    arguments = {"num_classes": class_count(model), "img_size": list(size)}
    if channels(model) != 3:
        return arguments | {"in_chans": channels(model)}
    config = configured_image_spec(model, size).config
    # Without an overlay the name's own values, of three colours, would replace those of other channels.
    others = {name: list(config[name]) for name in BY_CHANNEL if len(config[name]) != 3}
    return arguments | ({"pretrained_cfg_overlay": others} if others else {})


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    names = _config(model).get("classifier") or "head"
    return (names,) if isinstance(names, str) else tuple(names)


def filter_state(model: nn.Module, state: State) -> dict[str, Tensor]:
    """Return a state dict after the filter of timm's module that defines the model's class, where it has one.

    The filter maps names of older versions and other projects, and resamples tensors of another size.
    """
    adapt: Any = vars(sys.modules[plain_class(model).__module__]).get("checkpoint_filter_fn")
    if adapt is None:
        return dict(state)
    how: dict[str, Any] = {}
    if adapt is checkpoint_filter_fn:  # DeiT-III's own names, gamma_1 and gamma_2, are no other model's
        how["adapt_layer_scale"] = True
        if any(word in architecture(model) for word in ("flexi", "radio")):
            how |= {"interpolation": "bilinear", "antialias": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns where timm resamples a table
        return dict(adapt(dict(state), model, **how))


def _classifier_of(model: nn.Module, state: State) -> Tensor | None:
    named = (state[f"{name}.weight"] for name in _classifiers(model) if f"{name}.weight" in state)
    return next((each for each in named if each.ndim in (2, 4)), None)


def count_classes(model: nn.Module, state: State) -> int | None:
    """Return the number of classes of a state dict's classifier, by its present or an older name; None without one."""
    weight = _classifier_of(model, state)
    if weight is None:
        try:
            weight = _classifier_of(model, filter_state(model, state))
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError):
            return None  # the error is reported where the weights are fitted
    return None if weight is None else len(weight)


def arguments_shown(model: nn.Module, state: State) -> dict[str, Any]:
    """Return num_classes and in_chans of a state dict where they differ from the model's."""
    own, shown = model.state_dict(), dict[str, Any]()
    weight, mine = _classifier_of(model, state), _classifier_of(model, own)
    if mine is not None and (weight is None or len(weight) != len(mine)):
        shown["num_classes"] = 0 if weight is None else len(weight)
    first = next((name for name, each in own.items() if each.ndim == 4), "")
    if first in state and state[first].ndim == 4 and own[first].shape[1] == channels(model) != state[first].shape[1]:
        shown["in_chans"] = state[first].shape[1]
    return shown


def unused(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of weights of a classifier and an attention pooling that the model was built without."""
    pool = () if "attn_pool" in dict(model.named_children()) else ("attn_pool.",)
    return pool if class_count(model) else (*(f"{name}." for name in _classifiers(model)), *pool)


def set_preprocessing_(model: Any, preprocessing: Preprocessing) -> None:
    """Set a model's evaluation preprocessing where timm looks for it, so that copies have it too."""
    model.pretrained_cfg = _config(model) | preprocessing.settings


def set_size_(model: Any, size: Any) -> None:
    """Set the size of a model's images, one number or height and width, in its configuration."""
    height, width = size if isinstance(size, list | tuple) else (size, size)
    model.pretrained_cfg = _config(model) | {"input_size": (channels(model), int(height), int(width))}


def timm_output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    """Return the only port: logits, or an embedding without classifier; unpooled, token logits or a feature map."""
    if getattr(model, "global_pool", None) == "":
        return (OutputPort(name=LOGITS.name, role="token logits" if class_count(model) else "feature map"),)
    return (LOGITS if class_count(model) else OutputPort(name=LOGITS.name, role="embedding"),)


def facts(model: nn.Module) -> Facts:
    """Return the inputs and outputs that timm's configuration of the model says."""
    spec = configured_image_spec(model, configured_size(model))
    return Facts(spec=spec, outputs=timm_output_ports(model), classes=class_count(model))


def _created(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Return timm's model, without an image size where that is no argument: tracing reads it from the configuration."""
    try:
        return build_from_arguments(name, arguments)
    except TypeError as error:
        if "img_size" not in arguments or "argument 'img_size'" not in str(error):
            raise
        return build_from_arguments(name, {key: value for key, value in arguments.items() if key != "img_size"})


class _Unfilled(TorchDispatchMode):
    """A mode that skips writing initial weights on the meta device, which takes time and changes nothing.

    Other operations in place, such as `unsqueeze_`, change shapes and run.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _FILLING and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


_FILLING = {f"aten::{name}_" for name in ("add", "clamp", "erfinv", "fill", "mul", "normal", "uniform", "zero")}


def _built(architecture: Architecture) -> nn.Module:
    """Return timm's model. Raises BadInput for every error, since timm checks few of its arguments."""
    on_meta = torch.get_default_device().type == "meta"
    try:
        with _Unfilled() if on_meta else nullcontext():  # type: ignore[no-untyped-call]
            model = _created(architecture.name, dict(architecture.kwargs))
    except MemoryError:
        raise
    except Exception as error:
        raise BadInput(
            f"--model {quoted(architecture.name)} with arguments {quoted(str(dict(architecture.kwargs)))}: timm can't "
            f"build it ({type(error).__name__}: {str(error)[:300]}); {look_alikes(architecture.name)}; "
            "a directory written by corp-deploy works too"
        ) from None
    return model


def is_installed(name: str) -> bool:
    """Return whether timm's own code builds models of this name, not a function that a user registered."""
    base = name.partition(".")[0]
    return timm.is_model(base) and timm.model_entrypoint(base).__module__.partition(".")[0] == NAME


def settings() -> tuple[object, ...]:
    """Return the global settings that timm reads while it builds and runs a model."""
    attention = [layers.use_fused_attn(experimental=each) for each in (False, True)]
    return (*attention, layers.is_exportable(), layers.is_scriptable(), layers.is_no_jit())


_sizes: dict[tuple[str, str], int] = {}


def _size(architecture: Architecture) -> int:
    """Return the number of parameters of the model, counted once in a process on the meta device."""
    try:
        key = architecture.name, json.dumps(dict(architecture.kwargs), sort_keys=True)
    except TypeError:  # code among the arguments
        key = None
    if key is not None and key in _sizes:
        return _sizes[key]
    with torch.device("meta"):
        count = parameters(_built(architecture))
    return count if key is None else _sizes.setdefault(key, count)


def build_timm_model(architecture: Architecture) -> nn.Module:
    """Return timm's model with its initial weights, in eval mode. Raises BadInput for invalid names and arguments."""
    require_local_name(architecture.name)
    refuse_reserved(architecture.kwargs)
    refuse_unbounded(architecture.kwargs)
    count = _size(architecture)
    if count > MOST_PARAMETERS:
        raise BadInput(
            f"--model {quoted(architecture.name)} with these arguments has {count:,} parameters, "
            f"{MOST_PARAMETERS:,} at most are built; check --model-kwargs"
        )
    model = _built(architecture).eval()
    where = f"--model {quoted(architecture.name)}: its pretrained_cfg"
    for kind in (_Configured, Preprocessing):  # arguments may overlay both
        record_from_value(_config(model), kind, where=where, remedy="check --model-kwargs")
    set_preprocessing_(model, architecture.preprocessing)
    return model


_RMS = (layers.RmsNorm, layers.RmsNorm2d, layers.RmsNorm2dFp32, layers.RmsNormFp32)
_SIMPLE = (layers.SimpleNorm, layers.SimpleNorm2d, layers.SimpleNorm2dFp32, layers.SimpleNormFp32)
NORMS = (*TORCH_NORMS, Norm, *_RMS, *_SIMPLE)
