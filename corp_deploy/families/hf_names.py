"""The tensors of a vision transformer of transformers under timm's names, and back.

Names are read as transformers 4 and 5 write them on disk and as its modules have them; they are written as on disk,
which both versions read. Legend: B batch, N tokens, C channels.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ground.errors import BadInput

from .hf_config import VisionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How a kind's tensors are named on disk, by timm's paths: layers of a `block`, the three of its `qkv`, and what
    stands `around` the blocks. `layers`: what stands before a block's number.
    """

    layers: str
    qkv: tuple[str, ...]
    block: Mapping[str, str]
    around: Mapping[str, str]


_PATHS = ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2")


def _block(*theirs: str) -> dict[str, str]:
    return dict(zip(_PATHS, theirs, strict=True))


_VIT = Spelling(
    layers="encoder.layer",
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    block=_block("layernorm_before", "layernorm_after", "attention.output.dense", "intermediate.dense", "output.dense"),
    around={
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "dist_token": "embeddings.distillation_token",
    },
)
_DINOV2 = replace(_VIT, block=_block("norm1", "norm2", "attention.output.dense", "mlp.fc1", "mlp.fc2"))
_GATED = {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"}
_DINOV3 = Spelling(
    layers="layer",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    block=_block("norm1", "norm2", "attention.o_proj", "mlp.up_proj", "mlp.down_proj"),
    around={**_VIT.around, "patch_embed.proj": "embeddings.patch_embeddings", "norm": "norm"},
)
_CLIP = Spelling(
    layers="encoder.layers",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    block=_block("layer_norm1", "layer_norm2", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
    around={
        "patch_embed.proj": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        "norm_pre": "pre_layrnorm",
        "cls_token": "embeddings.class_embedding",
        "pos_embed": "embeddings.position_embedding.weight",
        "attn_pool.latent": "head.probe",
        "attn_pool.proj": "head.attention.out_proj",
        "attn_pool.norm": "head.layernorm",
        "attn_pool.mlp.fc1": "head.mlp.fc1",
        "attn_pool.mlp.fc2": "head.mlp.fc2",
    },
)
_EVERY = (_VIT, _DINOV2, _DINOV3, _CLIP)


def is_of_clip(model: VisionModel) -> bool:
    return model.config.model_type.endswith("_vision_model")


def spelling_of(model: VisionModel) -> Spelling:
    """As its class writes it."""
    plain = _DINOV3 if model.config.has_rope else _DINOV2 if model.config.mlp_ratio is not None else _VIT
    own = _CLIP if is_of_clip(model) else plain
    return replace(own, block={**own.block, **_GATED}) if model.config.use_swiglu_ffn else own


# What any of them calls a layer or a token: timm's path.
_IN_BLOCK = {theirs: ours for block in (*(each.block for each in _EVERY), _GATED) for ours, theirs in block.items()}
_SCALES = {"layer_scale1": "ls1.gamma", "layer_scale2": "ls2.gamma"}
_SCALES_OF_EVA = {"layer_scale1": "gamma_1", "layer_scale2": "gamma_2"}
# What is one layer of timm's: the paths of its rows, in order.
_JOINED = {"attn.qkv": tuple({each.qkv: None for each in _EVERY}), "mlp.fc1": (("mlp.gate_proj", "mlp.up_proj"),)}
_ROWS = {path: target for target, spellings in _JOINED.items() for paths in spellings for path in paths}
_AROUND = {theirs: ours for each in _EVERY for ours, theirs in each.around.items()}
_TOKENS = {theirs: ours for theirs, ours in _AROUND.items() if ours in ("cls_token", "pos_embed", "attn_pool.latent")}
_TOKENS["embeddings.register_tokens"] = "reg_token"
_OUTSIDE = {
    **{theirs: ours for theirs, ours in _AROUND.items() if theirs not in _TOKENS and ours != "dist_token"},
    "classifier": "head",
    "cls_classifier": "head",
    "distillation_classifier": "head_dist",
    "visual_projection": "head",
}
# What such a directory may hold beside the tower: what training masks, poolers nobody reads here, and text towers.
_BESIDE = (
    "embeddings.mask_token",
    "embeddings.position_ids",
    "rope_embeddings.",
    "pooler.",
    "decoder.",
    "text_model.",
    "text_projection.",
    "logit_scale",
    "logit_bias",
)
_HEADS = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")
_BLOCK = re.compile(r"(?:encoder\.)?layers?\.(\d{1,4})\.(.+)\.(weight|bias|lambda1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Tensors under timm's names, and those that have no place in the model, under their own."""

    state: dict[str, Tensor]
    beside: dict[str, Tensor]


def _without_prefix(state: Mapping[str, Tensor], prefix: str, where: str) -> dict[str, Tensor]:
    bare: dict[str, Tensor] = {}
    for name, tensor in state.items():
        own = name.removeprefix(prefix)
        if own in bare:
            raise BadInput(f"{where}: {own!r:.150} is there with and without {prefix!r}; save one of the two")
        bare[own] = tensor
    return bare


def _outside(name: str, model: VisionModel) -> str:
    """timm's name of a tensor outside the blocks, or nothing."""
    path, _, kind = name.rpartition(".")
    if path in _OUTSIDE and kind in ("weight", "bias"):
        return f"{_OUTSIDE[path]}.{kind}"
    if name == "embeddings.distillation_token":
        return "dist_token" if model.output == "distilled" else "reg_token"
    return _TOKENS.get(name, "")


def _pool(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Queries apart from keys and values of SigLIP's pooling attention; nothing for another tensor."""
    match = re.fullmatch(r"head\.attention\.in_proj_(weight|bias)", name)
    if match is None or tensor.ndim == 0 or tensor.shape[0] % 3:
        return {}
    width = tensor.shape[0] // 3
    return {f"attn_pool.q.{match[1]}": tensor[:width], f"attn_pool.kv.{match[1]}": tensor[width:]}


def _joined(target: str, parts: Mapping[str, Tensor], model: VisionModel, where: str) -> Tensor:
    """A layer of timm's out of those that stand apart, by their paths. Of queries, keys and values that have no bias
    beside some that have it is zeros, where a class knows each alone.
    """
    layer, _, kind = target.rpartition(".")
    path = layer.split(".", 2)[2]
    expected = next((paths for paths in _JOINED[path] if set(paths) & parts.keys()), ())
    if model.config.has_rope and (path, kind) == ("attn.qkv", "bias"):
        nothing = torch.zeros_like(next(iter(parts.values())))
        parts = {**dict.fromkeys(expected, nothing), **parts}
    present = [parts[path] for path in expected if path in parts]
    if len(present) < len(expected) or len({tensor.shape for tensor in present}) > 1:
        raise BadInput(f"{where}: {target}: expected {', '.join(expected)}, all of one shape")
    return torch.cat(present)


def state_from_transformers(state: Mapping[str, Tensor], model: VisionModel, *, where: str) -> Mapped:
    """A state dict under timm's names.

    Raises BadInput for a tensor of the tower that has no place there, and for parts of a layer that don't fit.
    """
    mapped: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Tensor]] = {}
    headless = model.output == "class token"
    scales, plain = (_SCALES_OF_EVA, not model.config.use_gated_mlp) if model.config.has_rope else (_SCALES, False)
    for name, tensor in _without_prefix(state, model.kind.prefix, where).items():
        match = _BLOCK.fullmatch(name)
        if name.startswith(_BESIDE) or (headless and name.startswith(_HEADS)):
            beside[name] = tensor
        elif match and match[2] in _ROWS and match[3] != "lambda1" and not (plain and match[2] == "mlp.up_proj"):
            target = f"blocks.{int(match[1])}.{_ROWS[match[2]]}.{match[3]}"
            rows.setdefault(target, {})[match[2]] = tensor
        elif match and match[2] in _IN_BLOCK and match[3] != "lambda1":
            mapped[f"blocks.{int(match[1])}.{_IN_BLOCK[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] in scales and match[3] == "lambda1":
            mapped[f"blocks.{int(match[1])}.{scales[match[2]]}"] = tensor
        elif pool := _pool(name, tensor):
            mapped |= pool
        elif target := _outside(name, model):
            # A token or a table of positions [C], [N,C] or [1,N,C] as timm keeps it: [1,N,C].
            is_rows = name in _TOKENS and tensor.ndim in (1, 2)
            mapped[target] = tensor.reshape(1, -1, tensor.shape[-1]) if is_rows else tensor
        else:
            raise BadInput(
                f"{where}: {name!r:.150} has no place in a {model.architecture}; its parts are of another kind"
            )
    if not model.config.num_register_tokens and model.config.has_rope:
        mapped.pop("reg_token", None)  # of no tokens
    mapped |= {target: _joined(target, parts, model, where) for target, parts in rows.items()}
    if model.config.model_type == "dinov2_with_registers" and {"cls_token", "pos_embed"} <= mapped.keys():
        # Where registers stand between, the class token has its position in itself, as timm keeps it.
        first, mapped["pos_embed"] = mapped["pos_embed"].split([1, mapped["pos_embed"].shape[1] - 1], dim=1)
        mapped["cls_token"] = mapped["cls_token"] + first
    return Mapped(state=mapped, beside=beside)


def with_positions_of(state: Mapping[str, Tensor], model: VisionModel, sides: tuple[int, int]) -> dict[str, Tensor]:
    """The state with positions for images of these sides, resampled as the model's class does: bicubic, and with
    anti-aliasing where there are registers.
    """
    config = model.config
    old, new = (
        tuple(side // patch for side, patch in zip(each, config.patch, strict=True)) for each in (config.sides, sides)
    )
    positions = state.get("pos_embed")
    if old == new or positions is None or positions.ndim != 3 or positions.shape[1] < math.prod(old):
        return dict(state)
    first, patches = positions.split([positions.shape[1] - math.prod(old), math.prod(old)], dim=1)
    grid = patches.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    resampled = F.interpolate(
        grid, size=new, mode="bicubic", align_corners=False, antialias=config.model_type == "dinov2_with_registers"
    )
    return {**state, "pos_embed": torch.cat([first.float(), resampled.flatten(2).transpose(1, 2)], dim=1)}
