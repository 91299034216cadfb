"""Encoders of transformers that no family reads, built by its own classes from a configuration.

No code of a directory is run and nothing is looked for on a network: a configuration is plain values, weights are
safetensors, and a class is one of the installed transformers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.traced.models.array_inputs import ArraySpec, InputSpec, parameters_of
from corp_deploy.traced.models.module import refuse_larger, traced_module
from ground.errors import BadInput, Missing
from ground.ports import Port

from .hf_config import Sides, both
from .module_facts import PREPARED, facts_with, in_a_line
from .timm_images import BY_CHANNEL, ImageSpec
from .tokenizer import TextSpec, Tokenization

PREFIX = "transformers:"
LENGTH = 16_000
"""Of a series where nobody says how long: a second of speech."""
_HEADS_OF_TRAINING = ("ForMaskedLM", "ForMaskedImageModeling", "ForPreTraining")
_WRITTEN = {"output_hidden_states": False, "output_attentions": False, "use_cache": False, "return_dict": True}
_IMAGES, _TEXT = "pixel_values", "input_ids"


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration, what one input is, and what was left out as its file has no weights of it."""

    config: dict[str, Any]
    img_size: Sides | None = None
    length: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    text: Tokenization | None = None
    without_pooler: bool = False

    @property
    def left_out(self) -> dict[str, bool]:
        """Layers, as a class is told."""
        return {"add_pooling_layer": False} if self.without_pooler else {}


def arguments_of(kwargs: Mapping[str, Any], *, where: str) -> Arguments:
    """Raises BadInput, naming the entry, for what is none."""
    try:
        return msgspec.convert(dict(kwargs), Arguments)
    except ValueError as error:  # msgspec's own are ValueErrors too
        raise BadInput(
            f"{where}: {str(error)[:200]}; a model of transformers takes img_size of images, or length of tokens or "
            "samples"
        ) from None


def architecture_of(kwargs: Mapping[str, Any], preprocessing: Preprocessing, *, where: str) -> Architecture:
    """As config.json of a model directory keeps it. Raises BadInput for what its library can't build."""
    arguments = arguments_of(kwargs, where=where)
    name = _class_of(arguments.config, where).__name__
    return Architecture(name=PREFIX + name, kwargs=dict(kwargs), preprocessing=preprocessing, family="traced")


def looks_like_decoder(config: Mapping[str, Any]) -> bool:
    """Whether it makes texts, by what wrote it."""
    return _written(config).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSeq2SeqLM"))


def _written(config: Mapping[str, Any]) -> str:
    written = config.get("architectures") or [""]
    return written[0] if isinstance(written, list) and isinstance(written[0], str) else ""


def is_theirs(model: nn.Module) -> bool:
    """Whether a module is of transformers' own classes."""
    return type(model).__module__.startswith("transformers.")


def write(model: nn.Module, directory: Path) -> None:
    """A model as transformers saves it."""
    with _quiet():
        model.save_pretrained(directory)  # type: ignore[operator]


def takes_text(config: Mapping[str, Any], *, where: str) -> bool:
    """Whether it takes ids of tokens. Raises BadInput as architecture_of does."""
    return bool(_class_of(config, where).main_input_name == _TEXT)


def build(architecture: Architecture) -> nn.Module:
    """The model with its initial weights, on the CPU whatever torch's default device is, as its code holds numbers
    that are no weights. Raises BadInput where transformers can't build it
    or it can't be traced, and for more parameters than are built.
    """
    where = architecture.name
    arguments = arguments_of(architecture.kwargs, where=where)
    refuse_larger(lambda: _built(arguments, where), where)
    with torch.device("cpu"):
        model = _built(arguments, where).eval()
        spec, names = _spec(model, arguments, architecture.preprocessing)
        return traced_module(model, facts_with(model, spec, names))


def state_of(directory: Path, architecture: Architecture) -> tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]:
    """Weights of a directory under the names of the model's modules, as its class reads them, after the arguments to
    build it without what is not there, and before the names of what is there and not used. Raises BadInput for weights
    that are missing.
    """
    arguments = arguments_of(architecture.kwargs, where=str(directory))
    model, loading_info = _read(directory, arguments)
    missing = sorted(loading_info["missing_keys"])
    if missing and all(".pooler." in f".{name}" for name in missing) and not arguments.without_pooler:
        arguments = msgspec.structs.replace(arguments, without_pooler=True)
        model, loading_info = _read(directory, arguments)
        missing = sorted(loading_info["missing_keys"])
    odd = [*missing, *(str(each[0]) for each in loading_info["mismatched_keys"])]
    if odd:
        raise BadInput(f"{directory}: no weights of the model's shape of {', '.join(odd[:3])}; save the whole model")
    without = {"without_pooler": True} if arguments.without_pooler else {}
    return without, dict(model.state_dict()), tuple(sorted(loading_info["unexpected_keys"]))


def _read(directory: Path, arguments: Arguments) -> tuple[nn.Module, Mapping[str, Any]]:
    kind = _class_of(arguments.config, str(directory))
    with _quiet():
        try:
            read: tuple[nn.Module, Mapping[str, Any]] = kind.from_pretrained(
                directory,
                config=_config(arguments.config, str(directory)),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=torch.float32,
                **arguments.left_out,
            )
        except Exception as error:
            raise BadInput(f"{directory}: transformers can't read it ({in_a_line(error)})") from None
    return read


def _built(arguments: Arguments, where: str) -> nn.Module:
    kind, config = _class_of(arguments.config, where), _config(arguments.config, where)
    try:
        with _quiet():
            model: nn.Module = kind(config, **arguments.left_out)
    except Exception as error:
        raise BadInput(f"{where}: transformers can't build a {kind.__name__} of this ({in_a_line(error)})") from None
    return model


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise Missing("the package transformers is not installed: pip install transformers") from None
    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says while it builds and reads: what matters of it is told by its values."""
    log = _library().logging
    before, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bar:
            log.enable_progress_bar()


def _config(values: Mapping[str, Any], where: str) -> Any:
    kinds, kind = _library().CONFIG_MAPPING, values.get("model_type")
    if kind not in kinds:
        own = ", and code of its own (auto_map) is never run" if values.get("auto_map") else ""
        raise BadInput(f"{where}: model_type is {kind!r:.60}, which the installed transformers does not know{own}")
    reasons = {
        "it is quantised; give the weights before that": values.get("quantization_config"),
        "it takes a backbone's weights from elsewhere": values.get("use_pretrained_backbone"),
        "it is a decoder, or has one": values.get("is_decoder") or values.get("is_encoder_decoder"),
    }
    if refused := next((reason for reason, holds in reasons.items() if holds), ""):
        raise BadInput(f"{where}: this {kind} can't be read: {refused}")
    try:
        return kinds[kind].from_dict({**values, **_WRITTEN})
    except Exception as error:
        raise BadInput(f"{where}: not the configuration of a {kind}: {in_a_line(error)}") from None


def _class_of(values: Mapping[str, Any], where: str) -> Any:
    """The class that wrote it; in place of heads that only training has, the model below them."""
    library, config, name = _library(), _config(values, where), _written(values)
    if not name or name.endswith(_HEADS_OF_TRAINING):
        has_class = type(config) in library.MODEL_MAPPING
        base = library.MODEL_MAPPING[type(config)] if has_class else None
        kind = base[0] if isinstance(base, list | tuple) else base
    else:
        kind = getattr(library, name, None)
    if not (isinstance(kind, type) and issubclass(kind, library.PreTrainedModel)):
        written = values.get("architectures") or [""]
        raise BadInput(f"{where}: architectures is {written!r:.100}, no class of the installed transformers")
    annotation: Any = kind
    if not isinstance(config, annotation.config_class):
        raise BadInput(f"{where}: architectures is {name}, which is no {values.get('model_type')}")
    return kind


def _spec(model: nn.Module, arguments: Arguments, preprocessing: Preprocessing) -> tuple[InputSpec, tuple[str, ...]]:
    """What the model takes, and by which of its parameters."""
    config: Any = model.config
    main = str(model.main_input_name)
    if main == _IMAGES:
        channels = int(getattr(config, "num_channels", 3))
        size: Any = arguments.img_size or getattr(config, "image_size", None) or 224
        shape = (channels, *both(tuple(size) if isinstance(size, list) else size))
        prepared = {**PREPARED, **preprocessing.spread(channels).settings, "input_size": shape}
        unknown = () if preprocessing.settings else BY_CHANNEL
        return ImageSpec(shape=shape, config={key: prepared[key] for key in prepared if key not in unknown}), (main,)
    if main != _TEXT:
        return ArraySpec(ports=(Port(name=main, shape=(arguments.length or LENGTH,)),)), (main,)
    if arguments.text is not None:
        names = tuple(port.name for port in arguments.text.ports)
        return TextSpec(tokenization=arguments.text, tokenizer_json="", vocabulary=config.vocab_size), names
    length = arguments.length or longest(model)
    names = tuple(name for name in (_TEXT, "attention_mask") if name in parameters_of(model))
    return ArraySpec(ports=tuple(Port(name=name, shape=(length,), dtype="int64") for name in names)), names


def longest(model: nn.Module) -> int:
    """The most tokens of a text: places, less those up to the padding's own where these are counted from there."""
    config: Any = model.config
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    paddings = [each.padding_idx for each in tables if isinstance(each, nn.Embedding) and each.padding_idx is not None]
    return int(getattr(config, "max_position_embeddings", 512)) - (paddings[0] + 1 if paddings else 0)


def most_tokens(config: Mapping[str, Any], *, where: str) -> int:
    """The same of a configuration."""
    with torch.device("meta"):
        return longest(_built(Arguments(config=dict(config)), where))
