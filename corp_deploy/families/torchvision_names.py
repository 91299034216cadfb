"""torchvision's models as timm's of the same architecture: names of models and of weights, those of its
VisionTransformer and SwinTransformer here; and its other classifiers. Imports neither library by itself.
"""

import re
from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

from ground.errors import BadInput

from .preprocessing import Preprocessing
from .torchvision_convnets import CONVNETS, OTHER_WEIGHTS, in_order, of_regnet, of_resnet
from .torchvision_twin import Twin, crop_pct

if TYPE_CHECKING:
    from torch import Size, Tensor

PREFIX = "torchvision:"


def _vit(name: str, resized: int = 256) -> Twin:
    return Twin(timm=name, kind="vit", crop_pct=crop_pct(resized), interpolation="bilinear")


def _swin(name: str, resized: int) -> Twin:
    return Twin(timm=name, kind="swin", crop_pct=crop_pct(resized), interpolation="bicubic")


def _swin_v2(name: str, resized: int) -> Twin:
    return Twin(timm=name, kind="swin v2", crop_pct=crop_pct(resized, 256), interpolation="bicubic")


TWINS: Mapping[str, Twin] = {
    "vit_b_16": _vit("vit_base_patch16_224"),
    "vit_b_32": _vit("vit_base_patch32_224"),
    "vit_l_16": _vit("vit_large_patch16_224", 242),
    "vit_l_32": _vit("vit_large_patch32_224"),
    "vit_h_14": _vit("vit_huge_patch14_224"),
    "swin_t": _swin("swin_tiny_patch4_window7_224", 232),
    "swin_s": _swin("swin_small_patch4_window7_224", 246),
    "swin_b": _swin("swin_base_patch4_window7_224", 238),
    "swin_v2_t": _swin_v2("swinv2_tiny_window8_256", 260),
    "swin_v2_s": _swin_v2("swinv2_small_window8_256", 260),
    "swin_v2_b": _swin_v2("swinv2_base_window8_256", 272),
    **CONVNETS,
}
_VIT = (
    (r"class_token", "cls_token"),
    (r"conv_proj\.(\w+)", r"patch_embed.proj.\1"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_(\d)\.(\w+)", r"blocks.\1.norm\2.\3"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(\w+)", r"blocks.\1.attn.qkv.\2"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(\w+)", r"blocks.\1.attn.proj.\2"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.(\w+)", r"blocks.\1.mlp.fc1.\2"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.(\w+)", r"blocks.\1.mlp.fc2.\2"),
    (r"encoder\.ln\.(\w+)", r"norm.\1"),
    (r"heads\.head\.(\w+)", r"head.\1"),
)
_SWIN = (
    (r"features\.0\.0\.(\w+)", r"patch_embed.proj.\1"),
    (r"features\.0\.2\.(\w+)", r"patch_embed.norm.\1"),
    (r"norm\.(\w+)", r"norm.\1"),
    (r"head\.(\w+)", r"head.fc.\1"),
)
_SWIN_LAYERS = ((r"mlp\.0\.", "mlp.fc1."), (r"mlp\.3\.", "mlp.fc2."))


def has_twin(text: str) -> bool:
    """Whether timm has a model of this architecture."""
    return text.removeprefix(PREFIX).partition(".")[0] in TWINS


def twin_of(text: str) -> Twin:
    """Of `torchvision:vit_b_16`, or by its weights too, `torchvision:resnet50.IMAGENET1K_V2`. Raises BadInput for any
    other model or weights.
    """
    name, _, weights = text.removeprefix(PREFIX).partition(".")
    if name not in TWINS:
        raise BadInput(f"--model {text:.100}: of torchvision's models {', '.join(TWINS)} are read, with --weights")
    twin = TWINS[name]
    if weights in ("", twin.weights):
        return twin
    if (name, weights) not in OTHER_WEIGHTS:
        others = (own for model, own in OTHER_WEIGHTS if model == name)
        known = ", ".join(f"{name}.{each}" for each in (twin.weights, *others) if each)
        raise BadInput(f"--model {text:.100}: expected {PREFIX}{name}{f', or one of {known}' if known else ''}")
    return OTHER_WEIGHTS[name, weights]


def _by_rules(name: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, new in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return None


def _of_swin(name: str) -> str | None:
    """Stages are features 1, 3, 5, 7; what merges the patches before a stage is of that stage in timm."""
    if block := re.fullmatch(r"features\.([1357])\.(\d+)\.(.*)", name):
        inner = block[3]
        for pattern, new in _SWIN_LAYERS:
            inner = re.sub(rf"^{pattern}", new, inner)
        return f"layers.{int(block[1]) // 2}.blocks.{block[2]}.{inner}"
    if merging := re.fullmatch(r"features\.([246])\.(.*)", name):
        return f"layers.{int(merging[1]) // 2}.downsample.{merging[2]}"
    return _by_rules(name, _SWIN)


def _named(name: str, twin: Twin) -> str | None:
    """timm's name of a weight; None for one that torchvision's model hasn't."""
    match twin.kind:
        case "vit":
            return _by_rules(name, _VIT)
        case "regnet":
            return of_regnet(name)
        case "resnet":
            return of_resnet(name)
        case _:
            return _of_swin(name)


def state_from_torchvision(
    state: Mapping[str, "Tensor"], twin: Twin, expected: Mapping[str, "Size"], *, where: str
) -> dict[str, "Tensor"]:
    """Weights by timm's names, which are `expected` where those of torchvision don't tell. Raises BadInput for names
    that are none of torchvision's model.
    """
    if twin.kind == "in order":
        return in_order(state, expected, where=where)
    names = {name: _named(name, twin) for name in state}
    if foreign := [name for name, new in names.items() if new is None]:
        raise BadInput(
            f"{where}: {', '.join(foreign[:3])}: no names of torchvision's weights of this model; expected the "
            "state dict of torchvision.models"
        )
    # Which pairs of places of a window share a bias, and where they are, is computed, by timm too.
    tables = ("relative_position_index", "relative_coords_table")
    kept = {str(new): state[name] for name, new in names.items() if not name.endswith(tables)}
    return _without_key_biases(kept) if twin.kind == "swin v2" else kept


def _without_key_biases(state: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Biases of queries and of values apart, as timm has them: those of keys are no part of cosine attention, and
    torchvision sets them to zero as it runs.
    """
    apart: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("attn.qkv.bias"):
            queries, _, values = tensor.chunk(3)
            at = name.removesuffix("qkv.bias")
            apart |= {f"{at}q_bias": queries, f"{at}v_bias": values}
        else:
            apart[name] = tensor
    return apart


def sides(state: Mapping[str, "Tensor"]) -> int | None:
    """Of the square images that a VisionTransformer's positions, by timm's names, are for; None where it has none."""
    if "pos_embed" not in state or "patch_embed.proj.weight" not in state:
        return None
    return isqrt(state["pos_embed"].shape[1] - 1) * int(state["patch_embed.proj.weight"].shape[-1])


def preprocessing_of(twin: Twin, side: int | None) -> Preprocessing:
    """As torchvision prepares images of the architecture's size; a VisionTransformer's larger ones are its weights of
    SWAG, resized to the crop's size.
    """
    swag = twin.kind == "vit" and side is not None and side > 224
    percent, interpolation = (1.0, "bicubic") if swag else (twin.crop_pct, twin.interpolation)
    return Preprocessing(
        mean=twin.mean, std=twin.std, crop_pct=percent, interpolation=interpolation, crop_mode="center"
    )


def library() -> Any:
    """torchvision's models."""
    import torchvision  # type: ignore[import-untyped]

    return torchvision.models


def classifiers() -> tuple[str, ...]:
    """Those of its classifiers."""
    return tuple(library().list_models(module=library()))


def require_classifier(text: str) -> tuple[str, Any]:
    """Of `torchvision:NAME` or `torchvision:NAME.WEIGHTS` the name, and the entry that says how images are prepared.
    Raises BadInput for any other.
    """
    name, _, weights = text.removeprefix(PREFIX).partition(".")
    if name not in classifiers():
        raise BadInput(
            f"--model {text:.100}: no classifier of torchvision's; expected one of {', '.join(classifiers())}"
        )
    entries = library().get_model_weights(name)
    if weights and weights not in entries.__members__:
        raise BadInput(
            f"--model {text:.100}: expected one of {', '.join(f'{name}.{each}' for each in entries.__members__)}"
        )
    return name, entries[weights] if weights else entries.DEFAULT
