"""Encoders of images, texts and series, built by transformers' own classes and traced.

A model gives the outputs of its class, one of them, or one embedding pooled from a text's tokens.

Legend: B inputs, N tokens, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context as exporting
from torch.nn import functional as F

from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.traced.models.array_inputs import ArraySpec, InputSpec, parameters_of
from corp_deploy.traced.models.module import Facts, refuse_larger, traced_module
from ground.errors import BadInput
from ground.ports import Port

from .hf_classes import IMAGES, TEXT, base_of, build_class, class_of, longest, read
from .hf_images import Sides, both
from .module_facts import PREPARED, facts_with
from .timm_images import BY_CHANNEL, ImageSpec
from .tokenizer import TextSpec, Tokenization

Pooling = Literal["mean", "first"]
CALLED = "called_by_corp_deploy"
CLASS_TOKEN = "last_hidden_state[:, 0]"
OUTPUTS: Mapping[str, str] = {
    "ViTModel": CLASS_TOKEN,
    "DeiTModel": CLASS_TOKEN,
    "Dinov2Model": "pooler_output",
    "Dinov2WithRegistersModel": "pooler_output",
    "DINOv3ViTModel": "pooler_output",
    "CLIPVisionModel": "pooler_output",
    "CLIPVisionModelWithProjection": "image_embeds",
    "SiglipVisionModel": "pooler_output",
    "DeiTForImageClassificationWithTeacher": "logits",
}
"""The main output of each class; models of other classes give all of their outputs."""
PREFIX, FAMILY = "transformers:", "traced"
LENGTH = 16_000  # the number of samples of a series where the user gives none: a second of speech
_INTERPOLATES = "interpolate_pos_encoding"


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of an encoder, its input, its output and the layers that it is built without.

    `length` counts tokens of a text or samples of a series. `output` names the one output of the class that the model
    gives, None for all. `pooling` and `normalize` make one embedding of a text's tokens. `without_pooler` is set where
    the file has no weights of the pooler.
    """

    config: dict[str, Any]
    img_size: Sides | None = None
    length: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    text: Tokenization | None = None
    output: str | None = None
    pooling: Pooling | None = None
    normalize: bool = False
    without_pooler: bool = False

    @property
    def left_out(self) -> dict[str, bool]:
        """The arguments of the class's constructor that leave out layers."""
        return {"add_pooling_layer": False} if self.without_pooler else {}


@dataclass(frozen=True, slots=True)
class CalledClass:
    """A class of transformers, extra arguments `more` of its forward, and the output to return by `arguments`."""

    kind: Any
    arguments: Arguments | None
    more: Mapping[str, Any]

    def raw_outputs(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        """Return the outputs of the class's own forward."""
        return self.kind.forward(model, **inputs, **self.more)

    def answer(self, outputs: Any, inputs: Mapping[str, Tensor]) -> Any:
        """Return `outputs` unchanged, or {"logits" or "embedding": tensor} of the named output or of pooled tokens."""
        arguments = self.arguments
        if arguments is None or (arguments.pooling is None and arguments.output is None):
            return outputs
        if arguments.pooling is None:
            output = arguments.output or ""
            field = output.removesuffix("[:, 0]")
            tensor = getattr(outputs, field, None)
            if tensor is None:
                raise BadInput(f"it gives no {field}, expected a class with pooled output")
            return {"logits" if output == "logits" else "embedding": tensor[:, 0] if output == CLASS_TOKEN else tensor}
        x_BNC = outputs.last_hidden_state
        if arguments.pooling == "first":
            out_BC = x_BNC[:, 0]
        else:
            # The tokens are weighted in float32 before the sum, since a sum of hundreds of tokens may overflow float16.
            weights_BN = inputs["attention_mask"].to(torch.float32)
            weights_BN = weights_BN / weights_BN.sum(dim=1, keepdim=True).clamp(min=1.0)
            out_BC = (x_BNC.to(torch.float32) * weights_BN.unsqueeze(-1)).sum(dim=1)
        if arguments.normalize:
            out_BC = F.normalize(out_BC.to(torch.float32), dim=-1)
        return {"embedding": out_BC.to(x_BNC.dtype)}


def answering_class(kind: Any, arguments: Arguments, more: Mapping[str, Any]) -> Any:
    """Return a subclass whose forward returns the output by `arguments`; the class itself if that changes nothing."""
    if arguments.pooling is None and arguments.output is None and not more:
        return kind
    called = CalledClass(kind, arguments, more)

    def forward(self: nn.Module, **inputs: Tensor) -> Any:
        return called.answer(called.raw_outputs(self, inputs), inputs)

    return type(kind.__name__, (kind,), {"forward": forward, CALLED: called, "__module__": kind.__module__})


def called_of(plain: type[nn.Module]) -> CalledClass:
    """Return the CalledClass of a class that `answering_class` made, or a new one that returns all outputs."""
    return vars(plain).get(CALLED) or CalledClass(plain, None, {})


def parse_arguments(kwargs: Mapping[str, Any], *, where: str) -> Arguments:
    """Return the arguments of an architecture. Raises BadInput, naming the entry, for an invalid one."""
    try:
        return msgspec.convert(dict(kwargs), Arguments)
    except ValueError as error:  # msgspec's own are ValueErrors too
        raise BadInput(f"{where}: {str(error)[:200]}; write the model again") from None


def architecture_of_encoder(arguments: Arguments, preprocessing: Preprocessing, *, where: str) -> Architecture:
    """Return the architecture that config.json keeps. Raises BadInput for a class that transformers does not have."""
    name = class_of(arguments.config, where=where).__name__
    kwargs = {"config": arguments.config}
    for key in arguments.__struct_fields__[1:]:
        value = msgspec.to_builtins(getattr(arguments, key))
        kwargs |= {} if value in (None, False) else {key: value}
    return Architecture(name=PREFIX + name, kwargs=kwargs, preprocessing=preprocessing, family=FAMILY)


def build_encoder(architecture: Architecture) -> nn.Module:
    """Return the traced model with its initial weights, on the CPU.

    torch's default device, such as meta, is not used: classes compute numbers that no file has. Raises BadInput
    where transformers can't build the model, it can't be traced, or it has too many parameters.
    """
    where = architecture.name
    arguments = parse_arguments(architecture.kwargs, where=where)
    refuse_larger(lambda: plain_model(arguments, where=where), where)
    with torch.device("cpu"):
        model = plain_model(arguments, where=where).eval()
        spec, names = _spec(model, arguments, architecture.preprocessing)
        return traced_module(model, facts_in_transformers(model, spec, names))


def facts_in_transformers(model: nn.Module, spec: InputSpec, parameters: Sequence[str]) -> Facts:
    """Return the inputs and outputs of a model of transformers, as `facts_with` does.

    torch.compiler.is_exporting() holds meanwhile, so that transformers' caches keep no fake tensors of the run.
    """
    with exporting():
        return facts_with(model, spec, parameters)


def plain_model(arguments: Arguments, *, where: str) -> nn.Module:
    """Return transformers' untraced model with initial weights, whose forward returns the output by `arguments`."""
    kind, config = class_of(arguments.config, where=where), arguments.config
    size = config.get("image_size")
    own_sides = tuple(size) if isinstance(size, list) else (size, size)
    resized = arguments.img_size is not None and both(arguments.img_size) != own_sides
    more = {_INTERPOLATES: True} if resized and _INTERPOLATES in signature(kind.forward).parameters else {}
    return build_class(answering_class(kind, arguments, more), config, arguments.left_out, where=where)


def state_of(directory: Path, arguments: Arguments) -> tuple[Arguments, dict[str, Tensor], tuple[str, ...]]:
    """Return the arguments that fit a directory's weights, these weights as the class reads them, and unused names.

    A pooler without weights is left out of the model. Raises BadInput for other weights that are missing.
    """
    kind = class_of(arguments.config, where=str(directory))
    model, loading_info = read(kind, arguments.config, directory, arguments.left_out)
    missing = sorted(loading_info["missing_keys"])
    if missing and all(".pooler." in f".{name}" for name in missing) and not arguments.without_pooler:
        arguments = msgspec.structs.replace(arguments, without_pooler=True)
        model, loading_info = read(kind, arguments.config, directory, arguments.left_out)
        missing = sorted(loading_info["missing_keys"])
    if odd := [*missing, *sorted(str(each[0]) for each in loading_info["mismatched_keys"])]:
        raise BadInput(
            f"{directory}: weights are missing or of another shape: {', '.join(odd[:3])}; save the whole model"
        )
    return arguments, dict(model.state_dict()), tuple(sorted(loading_info["unexpected_keys"]))


def _spec(model: nn.Module, arguments: Arguments, preprocessing: Preprocessing) -> tuple[InputSpec, tuple[str, ...]]:
    """Return the spec of the model's inputs, and the names of the parameters of its forward that take them."""
    config: Any = model.config
    main = str(model.main_input_name)
    if main == IMAGES:
        channels = int(getattr(config, "num_channels", 3))
        size: Any = arguments.img_size or getattr(config, "image_size", None) or 224
        shape = (channels, *both(tuple(size) if isinstance(size, list) else size))
        prepared = {**PREPARED, **preprocessing.spread(channels).settings, "input_size": shape}
        unknown = () if preprocessing.settings else BY_CHANNEL
        return ImageSpec(shape=shape, config={key: prepared[key] for key in prepared if key not in unknown}), (main,)
    if main != TEXT:
        return ArraySpec(ports=(Port(name=main, shape=(arguments.length or LENGTH,)),)), (main,)
    if arguments.text is not None:
        names = tuple(port.name for port in arguments.text.ports)
        return TextSpec(tokenization=arguments.text, tokenizer_json="", vocabulary=config.vocab_size), names
    length = arguments.length or longest(model)
    names = tuple(name for name in (TEXT, "attention_mask") if name in parameters_of(model))
    return ArraySpec(ports=tuple(Port(name=name, shape=(length,), dtype="int64") for name in names)), names


def most_tokens(config: Mapping[str, Any], *, where: str) -> int:
    """Return the largest number of tokens of a text that a configuration has positions for."""
    with torch.device("meta"):
        return longest(build_class(base_of(config, where=where), config, {}, where=where))
