"""timm's VisionTransformer family: how its models are run, prepared for and exported; see timm_sites.py for where they
are reduced, timm_merging.py for merged tokens, timm_library.py for what it shares with timm's other families.

Blocks of one attention and one MLP, pre-norm or residual post-norm, and of several side by side are reduced where the
attention has one fused qkv and the MLP is one of timm_mlps.py; anything else is refused with its reason. Hybrids, which
have a ResNet in front of their tokens, are traced.
"""

from collections.abc import Mapping
from typing import Any

from timm.layers import HybridEmbed
from timm.models._features import FeatureListNet
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library, timm_merging
from .merging import Merging
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import grid as grid
from .timm_library import output_ports as output_ports
from .timm_sites import require_vit
from .timm_sites import sites as sites
from .timm_sites import steps as steps

NAME = "timm"
# What stands before the patch embedding's projection, as ViTamin's stages: a network of its own, told apart in costs.
FIXED_PARTS = ("patch_embed.backbone",)


def accepts(model: nn.Module) -> bool:
    """Whether it is timm's VisionTransformer: ViT, DeiT, DeiT-III, DINO ViTs; with a ResNet in front it is traced."""
    return isinstance(model, VisionTransformer) and not (
        isinstance(model.patch_embed, HybridEmbed) and isinstance(model.patch_embed.backbone, FeatureListNet | ResNetV2)
    )


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """What each token of the residual stream is, in order."""
    vit = require_vit(model)
    prefix = ["class"] * int(vit.has_class_token) + ["register"] * vit.num_reg_tokens
    if vit.num_prefix_tokens > len(prefix):
        prefix.insert(1, "distillation")
    return (*prefix, *["patch"] * int(vit.patch_embed.num_patches))


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    vit = require_vit(model)
    assert isinstance(inputs, Tensor), type(inputs)
    x_BNC: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(inputs))))
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block, in which source tokens are at `sources_BM`."""
    vit = require_vit(model)
    outputs: Tensor = vit.forward_head(vit.norm(timm_merging.unmerged_for_head(vit, x_BNC, sources_BM)))
    return outputs


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """A stream behind the last norm, which is the identity where the norm stands behind the pooling."""
    x_BNC = require_vit(model).norm(x_BNC)
    return x_BNC


def with_merging(model: nn.Module, merging: Merging | None) -> nn.Module:
    """A copy in eval mode that merges tokens so, or none. Raises BadInput where it can't."""
    return timm_merging.with_merging(require_vit(model), merging)


def merging_of(model: nn.Module) -> Merging | None:
    """How the model merges tokens, None for one that doesn't."""
    return timm_merging.merging_of(require_vit(model))


def merging_refusal(model: nn.Module) -> str:
    """Why its tokens can't be merged, or nothing."""
    return timm_merging.merging_refusal(require_vit(model))


def depth(model: nn.Module) -> int:
    """How many blocks the model has."""
    return len(require_vit(model).blocks)


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter: older and other projects' names are mapped, and
    position embeddings and patches of another size resampled as timm does for this name.
    """
    vit = require_vit(model)
    flexible = any(word in timm_library.architecture(vit) for word in ("flexi", "radio"))
    how: dict[str, Any] = {"interpolation": "bilinear", "antialias": False} if flexible else {}
    # DeiT-III's own names, gamma_1 and gamma_2, are no other model's.
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state), vit, adapt_layer_scale=True, **how)
    return adapted


def unused(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the weights that a model of this architecture may have and this one was built without."""
    vit = require_vit(model)
    return timm_library.unused(vit) + (("attn_pool.",) if vit.attn_pool is None else ())


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    height, width = require_vit(model).patch_embed.img_size
    return timm_library.image_spec(model, (height, width))
