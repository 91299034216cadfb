"""timm's VisionTransformer family seen as sites. The only file that spells timm's attribute names.

A block is supported when it is the plain pre-norm block (fc1 / act / fc2 and one fused qkv); anything else is refused
with its reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.layers import Attention as TimmAttention
from timm.layers import LayerScale
from timm.layers import Mlp as TimmMlp
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort, Port, image_port
from ground.quantity import shown

from .architecture import MOST_PARAMETERS, Architecture
from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_site import HeadSite, Mixing
from .modules import parameters, replaced
from .preprocessing import Preprocessing
from .site import Site
from .sites import Refusal, Sites
from .steps import Branch, Passage, Step
from .timm_arguments import refuse_unbounded
from .timm_names import look_alikes, refuse_reserved, require_local_name
from .widths import HeadGeometry

NAME = "timm"
# What hybrids have before their patch embedding's projection: a network of its own, to be told apart in costs.
FIXED_PARTS = ("patch_embed.backbone",)


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


def _head_site(name: str, attention: nn.Module) -> HeadSite:
    if isinstance(attention, HeadAttention):
        heads, qk, v, geometry = attention.heads, attention.qk, attention.v, attention.geometry
    else:
        assert isinstance(attention, TimmAttention), type(attention)
        heads, qk, v, geometry = attention.num_heads, attention.head_dim, attention.head_dim, "square"
    plain = isinstance(attention.q_norm, nn.Identity) and isinstance(attention.k_norm, nn.Identity)
    mixing: Mixing = "free" if plain else "none"
    return HeadSite(
        name=name,
        module=attention,
        first=attention.qkv,
        last=attention.proj,
        heads=heads,
        qk=qk,
        v=v,
        scale=float(attention.scale),
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        geometry=geometry,
        mixing=mixing,
        reason="" if plain else "q_norm / k_norm stand before the dot product, so head dimensions can't be mixed",
    )


def _channel_site(name: str, mlp: nn.Module) -> ChannelSite:
    fc1, fc2 = mlp.fc1, mlp.fc2
    assert isinstance(fc1, nn.Linear), (name, fc1)
    assert isinstance(fc2, nn.Linear), (name, fc2)
    return ChannelSite(name=name, first=fc1, last=fc2, first_name=f"{name}.fc1", last_name=f"{name}.fc2")


def accepts(model: nn.Module) -> bool:
    """Whether it is timm's VisionTransformer: ViT, DeiT, DeiT-III, DINO ViTs."""
    return isinstance(model, VisionTransformer)


def _require_vit(model: nn.Module) -> VisionTransformer:
    assert isinstance(model, VisionTransformer), type(model)
    return model


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, of plain pre-norm blocks, dense or already reduced."""
    mlps: list[Site] = []
    attentions: list[Site] = []
    refused: list[Refusal] = []
    for index, block in enumerate(_require_vit(model).blocks):
        name, attention, mlp = f"blocks.{index}", f"blocks.{index}.attn", f"blocks.{index}.mlp"
        if type(block) is not TimmBlock:
            reason = f"block is {type(block).__name__}, expected the plain pre-norm Block"
            refused.append(Refusal(name=name, reason=reason, sites={attention: HeadSite.kind, mlp: ChannelSite.kind}))
            continue
        if reason := _attention_refusal(block.attn):
            refused.append(Refusal(name=attention, reason=reason, sites={attention: HeadSite.kind}))
        else:
            attentions.append(_head_site(attention, block.attn))
        if reason := _mlp_refusal(block.mlp):
            refused.append(Refusal(name=mlp, reason=reason, sites={mlp: ChannelSite.kind}))
        else:
            mlps.append(_channel_site(mlp, block.mlp))
    return Sites(every=(*mlps, *attentions), refused=tuple(refused))


def _branch(name: str, norm: nn.Module, layer: nn.Module, scale: nn.Module, read: Tensor | None) -> Branch | None:
    if isinstance(scale, LayerScale):
        return Branch(name=name, norm=norm, layer=layer, scale_C=scale.gamma.detach(), read=read)
    if isinstance(scale, nn.Identity):
        return Branch(name=name, norm=norm, layer=layer, scale_C=None, read=read)
    return None


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The blocks in the order they run, for evaluation (where drop-path is the identity): the two branches of a plain
    pre-norm block, any other block whole.
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
        yield Passage(module=block)


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


def classes(model: nn.Module) -> int:
    """How many classes the model tells apart; 0 for one that has no classifier."""
    return int(_require_vit(model).num_classes)


def token_weights(model: nn.Module, inputs: Inputs) -> None:
    """Every token of an image counts alike."""


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    vit = _require_vit(model)
    assert isinstance(inputs, Tensor), type(inputs)
    x_BNC: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(inputs))))
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    vit = _require_vit(model)
    outputs: Tensor = vit.forward_head(vit.norm(x_BNC))
    return outputs


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode whose attention is spelled MatMul-Softmax-MatMul with the scale on q alone and softmax in
    float32.

    `geometry` replaces that of heads whose q/k and v widths differ; None keeps each as it is.
    """
    copied = replaced(model, {site.name: site.plain(geometry) for site in sites(model).heads})
    for module in copied.modules():
        if isinstance(module, TimmAttention):
            module.fused_attn = False  # type: ignore[misc]  # final for TorchScript only
    return copied.eval().requires_grad_(False)


def depth(model: nn.Module) -> int:
    """How many blocks the model has."""
    return len(_require_vit(model).blocks)


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
class ImageSpec:
    """What the model expects of an image: shape (channels, height, width) and timm's evaluation preprocessing."""

    shape: tuple[int, int, int]
    config: Mapping[str, Any]
    medium: Literal["images"] = "images"

    @property
    def ports(self) -> tuple[Port, ...]:
        return (image_port(self.shape),)

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
        transform: Callable[[Any], Tensor] = timm.data.create_transform(**self.config, is_training=False)
        return transform


def set_preprocessing_(model: nn.Module, preprocessing: Preprocessing) -> None:
    """Let a model just built carry this evaluation preprocessing, where timm looks for it, in all its copies too."""
    vit = _require_vit(model)
    config: Any = {**_timm_config(vit), **preprocessing.settings}
    vit.pretrained_cfg = config


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    vit = _require_vit(model)
    height, width = vit.patch_embed.img_size
    config = dict(timm.data.resolve_model_data_config(model))
    config["input_size"] = (vit.in_chans, height, width)
    return ImageSpec(shape=(vit.in_chans, height, width), config=config)


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    """Logits, or the pooled features of a model that has no classifier."""
    return (LOGITS if classes(model) else OutputPort(name=LOGITS.name, role="embedding"),)


def _built(architecture: Architecture) -> nn.Module:
    """The model on torch's default device. Any error is one of the arguments: timm checks few of them."""
    try:
        model: nn.Module = timm.create_model(architecture.name, pretrained=False, **architecture.kwargs)
    except MemoryError:
        raise
    except Exception as error:
        raise BadInput(
            f"--model {shown(architecture.name)} with arguments {shown(str(dict(architecture.kwargs)))}: timm can't "
            f"build it ({type(error).__name__}: {str(error)[:300]}); {look_alikes(architecture.name)}; "
            "a directory written by corp-deploy works too"
        ) from None
    return model


def build(architecture: Architecture) -> nn.Module:
    """The timm model with its initial weights, in eval mode. Raises BadInput for an unknown name or arguments, and for
    more parameters than are built.
    """
    require_local_name(architecture.name)
    refuse_reserved(architecture.kwargs)
    refuse_unbounded(architecture.kwargs)
    with torch.device("meta"):
        count = parameters(_built(architecture))
    if count > MOST_PARAMETERS:
        raise BadInput(
            f"--model {shown(architecture.name)} with these arguments has {count:,} parameters, "
            f"{MOST_PARAMETERS:,} at most are built; check --model-kwargs"
        )
    model = _built(architecture).eval()
    if accepts(model):
        set_preprocessing_(model, architecture.preprocessing)
    return model


def beside(model: nn.Module) -> Mapping[str, str]:
    """Nothing: how images are prepared is a few numbers of config.json."""
    return {}


def take_beside_(model: nn.Module, directory: Path) -> None:
    """Nothing stands there."""
