"""timm's Cait family: talking heads over the patches, then blocks in which a class token reads them.

The residual stream is the patches'; the blocks of the class token, a token's worth of work, are part of the head.
"""

from collections.abc import Iterator, Mapping

from timm.layers import PatchEmbed
from timm.models.cait import Cait, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library, timm_placed_sites
from .channel_site import ChannelSite
from .head_site import HeadSite
from .sites import Refusal, Sites
from .steps import Step
from .timm_cait_blocks import own_state as own_state
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import grid as grid
from .timm_library import output_ports as output_ports

NAME = "timm-cait"
UNMERGEABLE = (
    "shares of tokens are mixed over the heads behind the softmax, where a merged one no longer counts as several"
)
_OF_CLASS = "block is {}: its query, and all that its MLP sees, is the class token's alone"


def accepts(model: nn.Module) -> bool:
    return isinstance(model, Cait)


def _cait(model: nn.Module) -> Cait:
    assert isinstance(model, Cait), type(model)
    return model


def _patches(model: nn.Module) -> PatchEmbed:
    embedding = _cait(model).patch_embed
    assert isinstance(embedding, PatchEmbed), embedding
    return embedding


def _refusals(cait: Cait) -> Iterator[Refusal]:
    for index, block in enumerate(cait.blocks_token_only or ()):
        name = f"blocks_token_only.{index}"
        lost = {f"{name}.attn": HeadSite.kind, f"{name}.mlp": ChannelSite.kind}
        yield Refusal(name=name, reason=_OF_CLASS.format(type(block).__name__), sites=lost)


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    of_patches = timm_placed_sites.sites(model)
    return Sites(every=of_patches.every, refused=(*of_patches.refused, *_refusals(_cait(model))))


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The branches of the blocks of the patches."""
    return timm_placed_sites.steps(model, read=read)


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    count: int = _patches(model).num_patches
    return ("patch",) * count


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    cait = _cait(model)
    x_BNC: Tensor = cait.patch_embed(inputs) + cait.pos_embed
    return x_BNC


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """A stream behind the last norm."""
    x_BNC = _cait(model).norm(x_BNC)
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block of patches."""
    cait = _cait(model)
    x_BNC = x_BNC if cait.blocks_token_only is None else cait.forward_cls(x_BNC)
    outputs: Tensor = cait.forward_head(cait.norm(x_BNC))
    return outputs


def depth(model: nn.Module) -> int:
    return len(_cait(model).blocks)


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    height, width = _patches(model).img_size
    return timm_library.image_spec(model, (height, width))


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter, under timm's names."""
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state))
    return adapted
