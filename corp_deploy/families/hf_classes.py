"""Classes of the installed transformers for a configuration, and models of them with the weights of a directory.

No code of a directory is run and no network is used: a configuration is plain values, weights are safetensors, and a
class is one of the installed transformers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ground.errors import BadInput, Missing

from .module_facts import in_a_line

TEXT, IMAGES = "input_ids", "pixel_values"  # the main input of classes that take tokens, and of those that take images
_HEADS_OF_TRAINING = ("ForMaskedLM", "ForMaskedImageModeling", "ForPreTraining")
_WRITTEN = {"output_hidden_states": False, "output_attentions": False, "use_cache": False, "return_dict": True}
_TOWERS = {
    "CLIPModel": ("clip_vision_model", "CLIPVisionModelWithProjection"),
    "SiglipModel": ("siglip_vision_model", "SiglipVisionModel"),
}
"""The model_type and the class of the images' tower, by the class that also has a tower of texts."""
_MOST_LAYERS, _MOST = 1024, 100_000_000
_SIZES = ("hidden", "size", "dim", "positions", "heads", "depth", "layer", "embed", "channels", "width")


def library() -> Any:
    """Return the package transformers. Raises Missing without it."""
    try:
        import transformers
    except ImportError:
        raise Missing("the package transformers is not installed: pip install 'corp-deploy[hf]'") from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars in the body; callers report faults themselves."""
    log = library().logging
    before, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bar:
            log.enable_progress_bar()


def is_theirs(model: nn.Module) -> bool:
    return type(model).__module__.startswith("transformers.")


def save_pretrained(model: nn.Module, directory: Path) -> None:
    """Save a model by its own save_pretrained, with its weights in one file."""
    with quiet():
        model.save_pretrained(directory, max_shard_size="10TB")  # type: ignore[operator]


def written_class(config: Mapping[str, Any]) -> str:
    """Return the first name in `architectures` of a configuration, the class that wrote it; empty without any."""
    written = config.get("architectures") or [""]
    return written[0] if isinstance(written, list) and isinstance(written[0], str) else ""


def looks_like_decoder(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration's class, by the end of its name, generates text."""
    return written_class(config).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSeq2SeqLM"))


def tower_in(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the configuration of the images' tower of CLIP or SigLIP; any other configuration unchanged."""
    model_type, name = _TOWERS.get(written_class(config), ("", ""))
    if not name:
        return dict(config)
    inner = config.get("vision_config", {})
    if not isinstance(inner, Mapping):
        raise BadInput(f"{where}: vision_config is {inner!r:.60}, expected the vision tower's configuration")
    beside = {key: config[key] for key in ("projection_dim", "auto_map", "quantization_config") if key in config}
    return {**inner, **beside, "model_type": model_type, "architectures": [name]}


def _refusals(values: Mapping[str, Any]) -> dict[str, bool]:
    kind = values.get("position_embedding_type") or "absolute"
    sizes = {
        name: value for name, value in values.items() if isinstance(value, int) and any(word in name for word in _SIZES)
    }
    larger = [name for name, value in sizes.items() if value > (_MOST_LAYERS if "layer" in name else _MOST)]
    return {
        "it comes with code of its own (auto_map), which is never run": bool(values.get("auto_map")),
        "it is quantised; give the weights before that": values.get("quantization_config") is not None,
        "it takes a backbone's weights from elsewhere": bool(values.get("use_pretrained_backbone")),
        "it is a decoder, or has one": bool(values.get("is_decoder") or values.get("is_encoder_decoder")),
        "it attends to an encoder": bool(values.get("add_cross_attention")),
        "some of its heads are removed already": bool(values.get("pruned_heads")),
        f"its position embeddings are {kind!r:.60}, which its class doesn't read": (
            kind != "absolute" and values.get("model_type") != "esm"
        ),
        f"{larger[:1]} is larger than that of any model": bool(larger),
    }


def config_from(values: Mapping[str, Any], *, where: str) -> Any:
    """Return transformers' configuration of these entries. Raises BadInput for an unknown or unsupported one."""
    kinds, kind = library().CONFIG_MAPPING, values.get("model_type")
    if kind not in kinds:
        own = ", and code of its own (auto_map) is never run" if values.get("auto_map") else ""
        raise BadInput(f"{where}: model_type is {kind!r:.60}, which the installed transformers does not know{own}")
    if refused := next((reason for reason, holds in _refusals(values).items() if holds), ""):
        raise BadInput(f"{where}: this {kind} can't be read: {refused}")
    try:
        return kinds[kind].from_dict({**values, **_WRITTEN})
    except Exception as error:
        raise BadInput(f"{where}: not the configuration of a {kind}: {in_a_line(error)}") from None


def base_of(values: Mapping[str, Any], *, where: str) -> Any:
    """Return the class of the model without its head. Raises BadInput where there is none."""
    mapping, config = library().MODEL_MAPPING, config_from(values, where=where)
    base = mapping.get(type(config), None)
    return base[0] if isinstance(base, list | tuple) else _required(base, values, where)


def class_of(values: Mapping[str, Any], *, where: str) -> Any:
    """Return the class in `architectures`, without a head for pretraining or none. Raises BadInput if it is unknown."""
    name = written_class(values)
    if not name or name.endswith(_HEADS_OF_TRAINING):
        return base_of(values, where=where)
    kind, config = _required(getattr(library(), name, None), values, where), config_from(values, where=where)
    if not isinstance(config, kind.config_class):
        raise BadInput(f"{where}: architectures is {name}, which is no {values.get('model_type')}")
    return kind


def _required(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, library().PreTrainedModel)):
        written = values.get("architectures") or [""]
        raise BadInput(f"{where}: architectures is {written!r:.100}, no class of the installed transformers")
    return kind


def read(
    kind: Any, values: Mapping[str, Any], directory: Path, left_out: Mapping[str, bool]
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a model with its weights, and transformers' lists of missing, unexpected and mismatched weights."""
    with quiet():
        try:
            found: tuple[nn.Module, Mapping[str, Any]] = kind.from_pretrained(
                directory,
                config=config_from(values, where=str(directory)),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # the lists returned have them
                dtype=torch.float32,
                **left_out,
            )
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(f"{directory}: transformers can't read it ({in_a_line(error)})") from None
    return found


def build_class(kind: Any, values: Mapping[str, Any], left_out: Mapping[str, bool], *, where: str) -> nn.Module:
    """Return a model with its initial weights. Raises BadInput where transformers can't build it."""
    config = config_from(values, where=where)
    try:
        with quiet():
            model: nn.Module = kind(config, **left_out)
    except Exception as error:
        raise BadInput(f"{where}: transformers can't build a {kind.__name__} of this ({in_a_line(error)})") from None
    return model


def longest(model: nn.Module) -> int:
    """Return the most tokens of a text: max_position_embeddings, else 512, less positions before the first token's."""
    config: Any = model.config
    tables = [each for name, each in model.named_modules() if name.endswith("position_embeddings")]
    paddings = [each.padding_idx for each in tables if isinstance(each, nn.Embedding) and each.padding_idx is not None]
    return int(getattr(config, "max_position_embeddings", 512)) - (paddings[0] + 1 if paddings else 0)
