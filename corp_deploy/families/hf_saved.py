"""A reduced vision transformer as transformers' own class has it, where its configuration can say the widths.

One MLP width for all layers (of DINOv2 a whole multiple of the model's width), and heads of one width for queries, keys
and values, alike in all layers, where the class reads `head_dim`. That class scales scores by head_dim^-1/2; what the
model's own scale is more or less goes into the queries. Names are as versions 4 and 5 write them on disk.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from corp_deploy.spec.widths import Widths
from ground.errors import BadInput

from .family import sites_of
from .hf_config import VisionConfig, VisionModel
from .hf_names import is_of_clip, spelling_of

INSTEAD = "corp_deploy.load reads the directory that is written without --save-as, and its ONNX graph runs anywhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What config.json and model.safetensors hold."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def saved_as(config: Mapping[str, Any], changes: Mapping[str, Any], state: Mapping[str, Tensor]) -> Saved:
    """The dense configuration with these changes, of tensors that share no memory."""
    own = {key: value for key, value in config.items() if key != "torch_dtype"}
    tensors = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    return Saved(config={**own, "dtype": "float32", **changes}, state=tensors)


def own_config(config: Mapping[str, Any], model: VisionModel) -> dict[str, Any]:
    """The configuration of the tower by itself, as its class has it."""
    kind = model.kind
    if not kind.inside:
        return {**config, "architectures": [model.architecture]}
    beside = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
    alone = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}
    return {
        **kind.defaults,
        **config.get(kind.inside, {}),
        **beside,
        "model_type": f"{model.config.model_type}_vision_model",
        "architectures": [alone.get(model.architecture, model.architecture)],
    }


def written_again(beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what a file has beside the model, what the class has too: a pooler and a mask token."""
    return {name: tensor for name, tensor in beside.items() if name.startswith(("pooler.", "embeddings.mask_token"))}


def _ratio(hidden: int, config: VisionConfig) -> int | None:
    """The whole `mlp_ratio` of which DINOv2 makes this hidden width (of a gated MLP: half its rows), or None."""
    rows = 2 * hidden if config.use_swiglu_ffn else hidden
    ratios = range(1, 2 * rows // config.hidden_size + 2)
    return next((ratio for ratio in ratios if structs.replace(config, mlp_ratio=float(ratio)).hidden == rows), None)


def _unsayable_mlps(widths: Mapping[str, int], config: VisionConfig) -> Iterator[str]:
    for name, width in widths.items():
        first, own = next(iter(widths.items()))
        if width != own:
            yield f"{name} is {width} wide and {first} {own}, and a configuration has one width for all layers"
        if width == 0:
            yield f"{name} is a constant"
        if config.mlp_ratio is not None and _ratio(width, config) is None:
            whole = f"{config.model_type}'s mlp_ratio is whole: multiples of {config.hidden_size} alone can be said"
            yield f"{name} is {width} wide, and {whole}"


def _unsayable_heads(widths: Mapping[str, Mapping[str, int]], model: VisionModel) -> Iterator[str]:
    """By attention, of queries and keys, and values, of a head."""
    dense = model.config.hidden_size // model.config.num_attention_heads
    for name, width in widths.items():
        first, own = next(iter(widths.items()))
        qk, v = width.get("qk", dense), width.get("v", dense)
        if qk != v:
            yield f"{name} has queries and keys of {qk} and values of {v}, expected one width: --heads square"
        if (qk, v) != (own.get("qk", dense), own.get("v", dense)):
            yield f"{name} has heads of {qk} and {first} of {own.get('qk', dense)}, expected one width for all layers"
        if qk == 0:
            yield f"{name} is a constant"
        if qk != dense and not model.kind.reads_head_dim:
            yield f"{name} has heads of {qk} instead of {dense}, and {model.architecture} reads no head_dim"


def refuse_unsayable(model: VisionModel, widths: Widths) -> None:
    """Raise BadInput, naming the first site, for widths of all sites that the configuration can't say."""
    channels, heads = dict[str, int](), dict[str, dict[str, int]]()
    for name, width in widths.items():
        path, _, part = name.rpartition(".")
        if part in ("qk", "v"):
            in_group = 2 if part == "qk" and model.config.has_rope else 1
            heads.setdefault(path, {})[part] = width * in_group // model.config.num_attention_heads
        else:
            channels[name] = width
    if reason := next(chain(_unsayable_mlps(channels, model.config), _unsayable_heads(heads, model)), ""):
        raise BadInput(f"--save-as hf: {reason}; {INSTEAD}")


def _attention(name: str, model: VisionModel, state: Mapping[str, Tensor], bias: bool) -> dict[str, Tensor]:
    """By timm's name of it; the scale is in the queries."""
    rows = len(state[f"{name}.qkv.weight"]) // 3
    tensors = {"weight": state[f"{name}.qkv.weight"]}
    if bias:
        tensors["bias"] = state.get(f"{name}.qkv.bias", torch.zeros(3 * rows))
    if rows != model.config.hidden_size:
        factor = (rows / model.config.hidden_size) ** 0.5
        scaled = {kind: (each[:rows].double() * factor).to(each.dtype) for kind, each in tensors.items()}
        tensors = {kind: torch.cat([scaled[kind], each[rows:]]) for kind, each in tensors.items()}
    return {
        f"{path}.{kind}": part
        for kind, tensor in tensors.items()
        for path, part in zip(spelling_of(model).qkv, tensor.split(rows), strict=True)
    }


def _block(index: int, model: VisionModel, state: Mapping[str, Tensor], bias: bool) -> dict[str, Tensor]:
    at, spelling = f"blocks.{index}.", spelling_of(model)
    block = _attention(f"{at}attn", model, state, bias)
    for path, theirs in spelling.block.items():
        width = state[f"{at}{path}.weight"].shape[0]
        block[f"{theirs}.weight"] = state[f"{at}{path}.weight"]
        block[f"{theirs}.bias"] = state.get(f"{at}{path}.bias", torch.zeros(width))
    for scale in ("1", "2"):
        for gamma in (f"{at}ls{scale}.gamma", f"{at}gamma_{scale}"):
            if gamma in state:
                block[f"layer_scale{scale}.lambda1"] = state[gamma]
    if model.config.use_gated_mlp:
        for kind in ("weight", "bias"):
            parts = block[f"mlp.up_proj.{kind}"].chunk(2)
            block[f"mlp.gate_proj.{kind}"], block[f"mlp.up_proj.{kind}"] = parts
    return {f"{spelling.layers}.{index}.{name}": tensor for name, tensor in block.items()}


def _outside(model: VisionModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names, width = spelling_of(model).around, model.config.hidden_size
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        path, _, kind = name.rpartition(".")
        if name in names:
            tensors[names[name]] = tensor
        elif path in names and kind in ("weight", "bias"):
            tensors[f"{names[path]}.{kind}"] = tensor
    if "reg_token" in state:
        token = "distillation_token" if model.config.model_type == "deit" else "register_tokens"
        tensors[f"embeddings.{token}"] = state["reg_token"]
    elif model.config.has_rope:
        tensors["embeddings.register_tokens"] = state["cls_token"][:, :0]
    for kind in ("weight", "bias") if "attn_pool.q.weight" in state else ():
        parts = [state[f"attn_pool.{part}.{kind}"] for part in ("q", "kv")]
        tensors[f"head.attention.in_proj_{kind}"] = torch.cat(parts)
    shapes = {"embeddings.class_embedding": (-1,), "embeddings.position_embedding.weight": (-1, width)}
    for name, shape in shapes.items():
        if name in tensors:
            tensors[name] = tensors[name].reshape(*shape)
    if model.config.model_type == "dinov2_with_registers":
        # The class token has its position in itself here.
        positions = tensors["embeddings.position_embeddings"]
        tensors["embeddings.position_embeddings"] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    return tensors


def _heads(model: VisionModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {"head": "classifier"}
    if model.output == "distilled":
        names = {"head": "cls_classifier", "head_dist": "distillation_classifier"}
    elif model.output == "projection":
        names = {"head": "visual_projection"}
    found = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in names.items() for kind in ("weight", "bias")}
    return {theirs: state[ours] for ours, theirs in found.items() if ours in state}


def saved(
    vit: nn.Module,
    model: VisionModel,
    config: Mapping[str, Any],
    sides: tuple[int, int],
    unread: Mapping[str, Tensor] = MappingProxyType({}),
) -> Saved:
    """The model for images of these sides as its class has it; `config` is the dense one's, `unread` what its file had
    beside the model and its class has, see `written_again`.

    Raises BadInput, naming the site, for widths that a configuration can't say.
    """
    # A bias of parts is one in a program.
    state = {name.replace("q_bias_folded", "qkv.bias"): each for name, each in state_of(vit).items()}
    if is_of_clip(model) and sides[0] != sides[1]:
        raise BadInput(f"--save-as hf: images of {sides}, expected square ones for {model.architecture}; {INSTEAD}")
    refuse_unsayable(model, {site.name: site.width for site in sites_of(vit).every})
    bias = is_of_clip(model) or any(name.endswith(".attn.qkv.bias") for name in state)
    tower = {**unread, **_outside(model, state)}
    for index in range(model.config.num_hidden_layers):
        tower |= _block(index, model, state, bias)
    prefix = "" if model.output in ("class token", "attention pool") else model.kind.prefix
    tensors = {f"{prefix}{name}": tensor for name, tensor in tower.items()} | _heads(model, state)
    return saved_as(config, _changes(state, model, sides, bias, "embeddings.mask_token" in tower), tensors)


def _changes(
    state: Mapping[str, Tensor], model: VisionModel, sides: tuple[int, int], bias: bool, masks: bool
) -> dict[str, Any]:
    config, changes = model.config, dict[str, Any]()
    hidden = state["blocks.0.mlp.fc2.weight"].shape[1]
    head = len(state["blocks.0.attn.qkv.weight"]) // 3 // config.num_attention_heads
    if config.mlp_ratio is not None:
        changes["mlp_ratio"] = _ratio(hidden, config)
    else:
        changes["intermediate_size"] = hidden
    if config.has_rope:
        changes |= dict.fromkeys(("query_bias", "key_bias", "value_bias"), bias)
    elif not is_of_clip(model):
        changes["qkv_bias"] = bias
    if head != config.hidden_size // config.num_attention_heads:
        changes["head_dim"] = head
    if config.model_type == "dinov2":
        changes["use_mask_token"] = masks
    if sides != config.sides:
        changes["image_size"] = sides[0] if sides[0] == sides[1] else list(sides)
    return changes
