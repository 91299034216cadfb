"""timm's VisionTransformer family seen as sites. The only file that spells timm's attribute names.

A block is supported when it is the plain pre-norm block (fc1 / act / fc2 and one fused qkv); anything else is refused
with its reason.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.layers import Attention as TimmAttention
from timm.layers import LayerScale
from timm.layers import Mlp as TimmMlp
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from calib.sites import ChannelTaps, HeadTaps, Tap
from ground.errors import BadInput

from .head_attention import Geometry, HeadAttention
from .preprocessing import Preprocessing
from .widths import HeadWidths

# What hybrids have before their patch embedding's projection: a network of its own, to be told apart in costs.
STEMS = ("patch_embed.backbone",)
WHOLE = "forward"  # what a model's own forward pass does between its modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSite:
    """The two linear layers of one MLP; `hidden` is the site's width."""

    name: str
    fc1: nn.Linear
    fc2: nn.Linear

    @property
    def hidden(self) -> int:
        return self.fc1.out_features

    @property
    def first(self) -> nn.Linear:
        return self.fc1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSite:
    """One attention layer: its linear layers and head widths; `keeps_qk` is the reason why Q/K must stay, or empty."""

    name: str
    module: nn.Module
    qkv: nn.Linear
    proj: nn.Linear
    heads: int
    qk: int
    v: int
    scale: float
    q_norm: nn.Module
    k_norm: nn.Module
    geometry: Geometry
    keeps_qk: str

    @property
    def first(self) -> nn.Linear:
        return self.qkv

    @property
    def widths(self) -> HeadWidths:
        return HeadWidths(qk=self.qk, v=self.v)

    @property
    def size(self) -> int:
        """The width that a reduction changes: of the values where Q/K must stay, else of queries and keys."""
        return self.v if self.keeps_qk else self.qk


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A place that can't be reduced, and why."""

    name: str
    reason: str

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that are lost: itself, or both of a block that is refused whole."""
        block = not self.name.endswith((".attn", ".mlp"))
        return (f"{self.name}.attn", f"{self.name}.mlp") if block else (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """What a model offers to reduction, in block order."""

    mlps: tuple[ChannelSite, ...]
    attentions: tuple[HeadSite, ...]
    refused: tuple[Refusal, ...]

    @property
    def every(self) -> "tuple[ChannelSite | HeadSite, ...]":
        """MLPs, then attentions."""
        return (*self.mlps, *self.attentions)


def _mlp_refusal(mlp: nn.Module) -> str:
    if type(mlp) is not TimmMlp:
        return f"MLP is {type(mlp).__name__}, expected timm's Mlp (fc1, act, fc2)"
    if not (isinstance(mlp.fc1, nn.Linear) and isinstance(mlp.fc2, nn.Linear)):
        return f"fc1 / fc2 are {type(mlp.fc1).__name__} / {type(mlp.fc2).__name__}, expected linear layers"
    if not isinstance(mlp.norm, nn.Identity):
        return f"a {type(mlp.norm).__name__} between the two linear layers mixes all hidden channels"
    if any(True for _ in mlp.act.parameters()):
        return f"activation {type(mlp.act).__name__} has parameters"
    return ""


def _attention_refusal(attention: nn.Module) -> str:
    if isinstance(attention, HeadAttention):
        return ""
    if type(attention) is not TimmAttention:
        return f"attention is {type(attention).__name__}, expected timm's Attention (one fused qkv)"
    if not isinstance(attention.norm, nn.Identity):
        return f"a {type(attention.norm).__name__} before the output projection mixes all heads"
    if "gate" in dict(attention.named_children()):  # an attribute since timm 1.0.28 only
        return "gated attention output"
    return ""


def _attention_part(name: str, attention: nn.Module) -> HeadSite:
    if isinstance(attention, HeadAttention):
        heads, qk, v, geometry = attention.heads, attention.qk, attention.v, attention.geometry
    else:
        assert isinstance(attention, TimmAttention), type(attention)
        heads, qk, v, geometry = attention.num_heads, attention.head_dim, attention.head_dim, "square"
    plain = isinstance(attention.q_norm, nn.Identity) and isinstance(attention.k_norm, nn.Identity)
    return HeadSite(
        name=name,
        module=attention,
        qkv=attention.qkv,
        proj=attention.proj,
        heads=heads,
        qk=qk,
        v=v,
        scale=float(attention.scale),
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        geometry=geometry,
        keeps_qk="" if plain else "q_norm / k_norm stand before the dot product, so head dimensions can't be mixed",
    )


def _mlp_part(name: str, mlp: nn.Module) -> ChannelSite:
    fc1, fc2 = mlp.fc1, mlp.fc2
    assert isinstance(fc1, nn.Linear), (name, fc1)
    assert isinstance(fc2, nn.Linear), (name, fc2)
    return ChannelSite(name=name, fc1=fc1, fc2=fc2)


def part_of(name: str, layer: nn.Module) -> ChannelSite | HeadSite:
    """timm's Attention or Mlp, or a reduced attention, as a part."""
    return _mlp_part(name, layer) if isinstance(layer, TimmMlp) else _attention_part(name, layer)


def _require_vit(model: nn.Module) -> VisionTransformer:
    if not isinstance(model, VisionTransformer):
        raise BadInput(
            f"model is {type(model).__name__}, expected timm's VisionTransformer (ViT, DeiT, DeiT-III, DINO ViTs): "
            "its blocks are built differently, so corp-deploy can't reduce it"
        )
    return model


def sites(model: nn.Module) -> Sites:
    """The prunable parts of a timm VisionTransformer, dense or already reduced.

    Raises BadInput for another architecture; a single block that can't be reduced is listed in `refused`.
    """
    mlps: list[ChannelSite] = []
    attentions: list[HeadSite] = []
    refused: list[Refusal] = []
    for index, block in enumerate(_require_vit(model).blocks):
        name = f"blocks.{index}"
        if type(block) is not TimmBlock:
            refused.append(
                Refusal(name=name, reason=f"block is {type(block).__name__}, expected the plain pre-norm Block")
            )
            continue
        if reason := _attention_refusal(block.attn):
            refused.append(Refusal(name=f"{name}.attn", reason=reason))
        else:
            attentions.append(_attention_part(f"{name}.attn", block.attn))
        if reason := _mlp_refusal(block.mlp):
            refused.append(Refusal(name=f"{name}.mlp", reason=reason))
        else:
            mlps.append(_mlp_part(f"{name}.mlp", block.mlp))
    return Sites(mlps=tuple(mlps), attentions=tuple(attentions), refused=tuple(refused))


def _head_slice(part: HeadSite, start: int) -> Callable[[Tensor], Tensor]:
    """Take rows start .. start + heads * qk of the qkv output as [B,H,N,qk]."""

    def take(qkv_BNX: Tensor) -> Tensor:
        rows_BNR = qkv_BNX[..., start : start + part.heads * part.qk]
        return rows_BNR.reshape(*rows_BNR.shape[:2], part.heads, part.qk).transpose(1, 2)

    return take


def _identity(x: Tensor) -> Tensor:
    return x


def calibration_site(part: ChannelSite | HeadSite) -> ChannelTaps | HeadTaps:
    """Where calibration listens: the input of fc2, or q and k as they enter the dot product and the input of proj."""
    if isinstance(part, ChannelSite):
        return ChannelTaps(name=part.name, output=part.fc2)
    if part.keeps_qk:
        queries, keys = Tap(module=part.q_norm, take=_identity), Tap(module=part.k_norm, take=_identity)
    else:
        queries = Tap(module=part.qkv, take=_head_slice(part, 0))
        keys = Tap(module=part.qkv, take=_head_slice(part, part.heads * part.qk))
    return HeadTaps(name=part.name, queries=queries, keys=keys, output=part.proj)


def calibration_sites(model: nn.Module) -> list[ChannelTaps | HeadTaps]:
    """The sites of every part that can be reduced, in the order they run."""
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return [calibration_site(part) for part in sorted(sites(model).every, key=lambda part: order[part.name])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One residual branch of a block: x + scale * layer(norm(x)).

    `scale_C` is LayerScale's, or None without one. `read`: the tokens whose results count, None for all; in the last
    block those that the outputs read, elsewhere all.
    """

    name: str
    norm: nn.Module
    layer: nn.Module
    scale_C: Tensor | None
    read: Tensor | None = None

    def added_by(self, layer: nn.Module, x_BNC: Tensor) -> Tensor:
        """What the branch adds to the residual stream with this layer in place of its own."""
        out_BNC: Tensor = layer(self.norm(x_BNC))
        return out_BNC if self.scale_C is None else out_BNC * self.scale_C

    def through(self, layer: nn.Module, x_BNC: Tensor) -> Tensor:
        """The residual stream behind the branch with this layer in place of its own."""
        return x_BNC + self.added_by(layer, x_BNC)


def _branch(name: str, norm: nn.Module, layer: nn.Module, scale: nn.Module, read: Tensor | None) -> Branch | None:
    if isinstance(scale, LayerScale):
        return Branch(name=name, norm=norm, layer=layer, scale_C=scale.gamma.detach(), read=read)
    if isinstance(scale, nn.Identity):
        return Branch(name=name, norm=norm, layer=layer, scale_C=None, read=read)
    return None


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Branch | nn.Module]:
    """The blocks in the order they run, for evaluation (where drop-path is the identity): the two branches of a plain
    pre-norm block, any other block whole. `read`: the tokens behind the last block that count, None for all.
    """
    blocks = _require_vit(model).blocks
    for index, block in enumerate(blocks):
        counted = read if index == len(blocks) - 1 else None
        if type(block) is TimmBlock:
            attention = _branch(f"blocks.{index}.attn", block.norm1, block.attn, block.ls1, counted)
            mlp = _branch(f"blocks.{index}.mlp", block.norm2, block.mlp, block.ls2, counted)
            if attention is not None and mlp is not None:
                yield attention
                yield mlp
                continue
        yield block


def last_block(model: nn.Module) -> nn.Module:
    """The block whose output is the last residual stream."""
    block: nn.Module = _require_vit(model).blocks[-1]
    return block


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """What each token of the residual stream is, in order."""
    vit = _require_vit(model)
    prefix = ["class"] * int(vit.has_class_token) + ["register"] * vit.num_reg_tokens
    if vit.num_prefix_tokens > len(prefix):
        prefix.insert(1, "distillation")
    return (*prefix, *["patch"] * int(vit.patch_embed.num_patches))


def makes_features(model: nn.Module) -> bool:
    """Whether the model has no classifier: whoever uses it may read any token."""
    return classes(model) == 0


def classes(model: nn.Module) -> int:
    """How many classes the model tells apart; 0 for one that has no classifier."""
    return int(_require_vit(model).num_classes)


def embedded(model: nn.Module, images: Tensor) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    vit = _require_vit(model)
    x_BNC: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    vit = _require_vit(model)
    outputs: Tensor = vit.forward_head(vit.norm(x_BNC))
    return outputs


def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with the named submodules replaced; the model given is left as it is."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in modules.items()}
    return copy.deepcopy(model, memo)


def first_name(part: ChannelSite | HeadSite) -> str:
    """What a site's first linear layer is called inside its layer."""
    return "fc1" if isinstance(part, ChannelSite) else "qkv"


def with_first(layer: nn.Module, part: ChannelSite | HeadSite, first: nn.Linear) -> nn.Module:
    """A copy of a part's layer with another first linear layer of the same widths."""
    return replaced(layer, {first_name(part): first})


def with_modules(layer: nn.Module, name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The layer of this name with its new modules, which are it or inside it and go by their names in the model."""
    return (
        modules[name]
        if name in modules
        else replaced(layer, {key.removeprefix(f"{name}."): new for key, new in modules.items()})
    )


def exportable(model: nn.Module, *, geometry: Geometry | None = None) -> nn.Module:
    """A copy in eval mode whose attention is spelled MatMul-Softmax-MatMul with the scale on q alone and softmax in
    float32.

    `geometry` replaces that of heads whose q/k and v widths differ; None keeps each as it is.
    """
    plain = {part.name: _plain_attention(part, geometry) for part in sites(model).attentions}
    copied = replaced(model, plain)
    for module in copied.modules():
        if isinstance(module, TimmAttention):
            module.fused_attn = False  # type: ignore[misc]  # final for TorchScript only
    return copied.eval().requires_grad_(False)


def _plain_attention(part: HeadSite, geometry: Geometry | None) -> HeadAttention:
    chosen = part.geometry if geometry is None or part.qk == part.v else geometry
    plain = empty_attention(part, qk=part.qk, v=part.v, geometry=chosen, fused=False)
    plain.load_state_dict(part.module.state_dict())
    return plain


def empty_attention(
    part: HeadSite,
    *,
    qk: int,
    v: int,
    geometry: Geometry,
    qkv_bias: bool | None = None,
    proj_bias: bool | None = None,
    fused: bool = True,
) -> HeadAttention:
    """An attention module for this place with other head widths, its weights not yet set."""
    with torch.device(part.qkv.weight.device):
        module = HeadAttention(
            dim=part.qkv.in_features,
            heads=part.heads,
            qk=qk,
            v=v,
            scale=part.scale,
            geometry=geometry,
            qkv_bias=part.qkv.bias is not None if qkv_bias is None else qkv_bias,
            proj_bias=part.proj.bias is not None if proj_bias is None else proj_bias,
            q_norm=copy.deepcopy(part.q_norm),
            k_norm=copy.deepcopy(part.k_norm),
            fused=fused,
        )
    return module.to(part.qkv.weight.dtype)


def empty_mlp(
    part: ChannelSite, *, hidden: int, output_bias: bool, input_bias: bool | None = None
) -> dict[str, nn.Linear]:
    """fc1 and fc2 of this MLP at another hidden width, by module name, their weights not yet set."""
    device, dtype = part.fc1.weight.device, part.fc1.weight.dtype
    input_bias = part.fc1.bias is not None if input_bias is None else input_bias
    fc1 = nn.Linear(part.fc1.in_features, hidden, bias=input_bias, device=device, dtype=dtype)
    fc2 = nn.Linear(hidden, part.fc2.out_features, bias=output_bias, device=device, dtype=dtype)
    return {f"{part.name}.fc1": fc1, f"{part.name}.fc2": fc2}


def depth(model: nn.Module) -> int:
    """How many blocks the model has."""
    return len(_require_vit(model).blocks)


def device(model: nn.Module) -> torch.device:
    """Where the model's weights are."""
    return next(model.parameters()).device


def tokens(model: nn.Module) -> int:
    """Tokens of one image in every block: patches and prefix tokens."""
    vit = _require_vit(model)
    return int(vit.patch_embed.num_patches + vit.num_prefix_tokens)


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter: older and other projects' names are mapped, and
    position embeddings and patches of another size resampled as timm does for this name.
    """
    vit = _require_vit(model)
    flexible = any(word in architecture(vit) for word in ("flexi", "radio"))
    how: dict[str, Any] = {"interpolation": "bilinear", "antialias": False} if flexible else {}
    # DeiT-III's own names, gamma_1 and gamma_2, are no other model's.
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state), vit, adapt_layer_scale=True, **how)
    return adapted


def _timm_config(model: nn.Module) -> dict[str, Any]:
    config: Any = _require_vit(model).pretrained_cfg
    return dict(config)


def architecture(model: nn.Module) -> str:
    """timm's name of the model as it was built, without its tag."""
    return str(_timm_config(model).get("architecture") or "")


def input_and_classes(model: nn.Module) -> dict[str, Any]:
    """The arguments that a name's tag or timm's defaults decided, spelled out: classes, image size and channels."""
    vit = _require_vit(model)
    size = {"num_classes": vit.num_classes, "img_size": list(vit.patch_embed.img_size)}
    return size if vit.in_chans == 3 else size | {"in_chans": vit.in_chans}


def pretrained_tag(model: nn.Module) -> str:
    """The tag whose configuration timm took for this name; empty where the name has none."""
    return str(_timm_config(model).get("tag") or "")


def unused(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the weights that a model of this architecture may have and this one was built without."""
    vit = _require_vit(model)
    classifiers = _timm_config(vit).get("classifier") or "head"
    heads = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    without_head = tuple(f"{name}." for name in heads) if vit.num_classes == 0 else ()
    return without_head + (("attn_pool.",) if vit.attn_pool is None else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What the model expects of an image: shape (channels, height, width) and timm's evaluation preprocessing."""

    shape: tuple[int, int, int]
    config: Mapping[str, Any]

    def as_line(self) -> str:
        """The preprocessing for people."""
        config = self.config
        mean, std = (" ".join(f"{value:.4g}" for value in config[name]) for name in ("mean", "std"))
        size = "x".join(map(str, self.shape))
        crop = f"{config['interpolation']}, crop {config['crop_pct']:g} ({config['crop_mode']})"
        return f"{size}, {crop}, mean {mean}, std {std}"

    def as_json(self) -> dict[str, Any]:
        """The preprocessing as plain JSON values, in one order."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(self.config.items())}

    def transform(self) -> Callable[[Any], Tensor]:
        """timm's evaluation transform: an RGB image of PIL -> float32 [C,H,W]."""
        made: Callable[[Any], Tensor] = timm.data.create_transform(**self.config, is_training=False)
        return made


def set_preprocessing_(model: nn.Module, preprocessing: Preprocessing) -> None:
    """Let a model just built carry this evaluation preprocessing, where timm looks for it, in all its copies too."""
    vit = _require_vit(model)
    config: Any = {**_timm_config(vit), **preprocessing.given}
    vit.pretrained_cfg = config


def input_spec(model: nn.Module) -> InputSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    vit = _require_vit(model)
    height, width = vit.patch_embed.img_size
    config = dict(timm.data.resolve_model_data_config(model))
    config["input_size"] = (vit.in_chans, height, width)
    return InputSpec(shape=(vit.in_chans, height, width), config=config)
