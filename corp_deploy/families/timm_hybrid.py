"""The convolutional networks in front of timm's hybrid VisionTransformers (arXiv 2010.11929, section 3.1), as rows of
convolutions.
"""

from collections.abc import Mapping

from timm.layers import HybridEmbed
from timm.models._features import FeatureListNet
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from . import timm_convnets
from .modules import replaced
from .site import Site
from .sites import Refusal
from .timm_conv_sites import conv_sites
from .timm_convnets import conversion_of, converted

BACKBONE = "patch_embed.backbone"


def _backbone(model: nn.Module) -> nn.Module | None:
    """A ResNet in front of the model's tokens, None where there is none."""
    if not (isinstance(model, VisionTransformer) and isinstance(model.patch_embed, HybridEmbed)):
        return None
    backbone = model.patch_embed.backbone
    has_stages = isinstance(backbone, FeatureListNet) and {"conv1", "layer1"} <= dict(backbone.named_children()).keys()
    return backbone if has_stages or isinstance(backbone, ResNetV2) else None


def with_conv_backbone(model: nn.Module) -> nn.Module:
    """The model with a ResNet in front of its tokens as rows of convolutions for its images; itself without one."""
    backbone = _backbone(model)
    if backbone is None:
        return model
    assert isinstance(model, VisionTransformer), type(model)
    height, width = model.patch_embed.img_size
    return replaced(model, {BACKBONE: converted(backbone, (int(model.patch_embed.in_chans), height, width))})


def backbone_sites(model: nn.Module) -> tuple[tuple[Site, ...], tuple[Refusal, ...]]:
    """Of the rows of convolutions in front of the tokens; none in timm's own model."""
    backbone = _backbone(model)
    return ((), ()) if backbone is None or conversion_of(backbone) is None else conv_sites(backbone, f"{BACKBONE}.")


def own_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under timm's names under the model's own, in its own order."""
    backbone = _backbone(model)
    if backbone is None:
        return dict(state)
    above = f"{BACKBONE}."
    inside = {name.removeprefix(above): tensor for name, tensor in state.items() if name.startswith(above)}
    own = {f"{above}{name}": tensor for name, tensor in timm_convnets.own_state(backbone, inside).items()}
    own |= {name: tensor for name, tensor in state.items() if not name.startswith(above)}
    return {name: own[name] for name in model.state_dict() if name in own} | own
