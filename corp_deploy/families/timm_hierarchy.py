"""timm's hierarchies whose blocks change their layout and size on the way: Hiera, MaxViT and CoAtNet, TinyViT,
EfficientFormer.

Their blocks are made blocks of tokens (timm_hierarchies.py), for the one image size that the model is built for.

Legend: B images, N tokens of a stage, C channels.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from timm.models import efficientformer, hiera, maxxvit, tiny_vit
from timm.models.efficientformer import EfficientFormer
from timm.models.efficientformer_v2 import EfficientFormerV2
from timm.models.hiera import Hiera
from timm.models.maxxvit import MaxxVit
from timm.models.tiny_vit import TinyVit
from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput

from . import timm_library
from .attention_site import site_of_attention
from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_site import HeadSite
from .maps import Grid, map_from_tokens, tokens_from_map
from .pooled_queries import REASON, PooledQueries
from .site import Site
from .sites import Refusal, Sites
from .steps import Step
from .timm_hierarchies import Hierarchy, library_form, timm_blocks
from .timm_hierarchies import own_state as own_state
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import output_ports as output_ports
from .timm_mlps import channel_site, is_mlp, mlp_refusal
from .token_blocks import Place, TokenBlock, token_blocks

Function = TypeVar("Function")
NAME = "timm-hierarchy"
UNMERGEABLE = "stages make fewer tokens of neighbours, by rows and columns of positions, so none can be merged away"
_OF_TIMM = (
    "block is {} of timm's, whose layers are told of maps and windows from outside; a model that corp-deploy builds "
    "has another one of the same function, as with_token_blocks of corp_deploy.families.timm_hierarchies makes them"
)


def accepts(model: nn.Module) -> bool:
    return isinstance(model, Hierarchy)


def _hierarchy(model: nn.Module) -> Hierarchy:
    assert isinstance(model, Hierarchy), type(model)
    return model


def _head_site(name: str, attention: HeadAttention) -> HeadSite:
    pooled = isinstance(attention.q_norm, PooledQueries)
    return site_of_attention(
        name, attention, mixing="none" if pooled else "free", norm=None, reason=REASON if pooled else ""
    )


def _sites_of_block(name: str, block: TokenBlock) -> Iterator[Site | Refusal]:
    """In the order of their names."""
    for each in block.kept:
        place = f"{name}.{each.name}".removesuffix(".")
        yield Refusal(name=place, reason=each.reason, sites={place: each.kind})
    for part, module in block.named_modules():
        place = f"{name}.{part}"
        if isinstance(module, HeadAttention):
            yield _head_site(place, module)
        elif is_mlp(module) and (reason := mlp_refusal(module)):
            yield Refusal(name=place, reason=reason, sites={place: ChannelSite.kind})
        elif is_mlp(module):
            yield channel_site(place, module)


def sites(model: nn.Module) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    every: list[Site] = []
    refused: list[Refusal] = []
    for name, block in token_blocks(model):
        for each in _sites_of_block(name, block):
            if isinstance(each, Refusal):
                refused.append(each)
            else:
                every.append(each)
    for name, foreign in timm_blocks(_hierarchy(model)):
        reason = _OF_TIMM.format(type(foreign).__name__)
        refused.append(Refusal(name=name, reason=reason, sites={name: ChannelSite.kind}))
    every.sort(key=lambda site: site.kind != ChannelSite.kind)
    return Sites(every=tuple(every), refused=tuple(refused))


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The parts of the blocks in the order they run."""
    blocks = token_blocks(_hierarchy(model))
    for name, block in blocks:
        yield from block.steps(name, read if block is blocks[-1][1] else None)


def _of_hiera(model: Any, images: Tensor) -> Tensor:
    x_BNC: Tensor = model.unroll(model._pos_embed(model.patch_embed(images)))
    return x_BNC


_STEMS: Mapping[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    EfficientFormer: lambda model, images: tokens_from_map(model.stem(images)),
    EfficientFormerV2: lambda model, images: tokens_from_map(model.stem(images)),
    Hiera: _of_hiera,
    MaxxVit: lambda model, images: tokens_from_map(model.stem(images)),
    TinyVit: lambda model, images: tokens_from_map(model.patch_embed(images)),
}
"""What makes the first stream of images."""


def _of(by_class: Mapping[type[nn.Module], Function], model: nn.Module) -> Function:
    """What is said of the model's class; one with named outputs is of a class of its own below that."""
    return next(function for kind, function in by_class.items() if isinstance(_hierarchy(model), kind))


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    assert isinstance(inputs, Tensor), type(inputs)
    return _of(_STEMS, model)(model, inputs)


def _last(model: nn.Module) -> Place:
    """Where the last block stands."""
    return token_blocks(_hierarchy(model))[-1][1].place


def _as_head_has_it(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """Tokens, or the map that they are, behind the model's norm where that stands before the pooling."""
    last = _last(model)
    x = x_BNC if last.layout == "tokens" else map_from_tokens(x_BNC, last.behind)
    norms = dict(_hierarchy(model).named_children())
    normed: Tensor = norms["norm"](x) if "norm" in norms else x
    return normed


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    outputs: Tensor = _hierarchy(model).forward_head(_as_head_has_it(model, x_BNC))
    return outputs


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The last stage's stream before the head's pooling."""
    x = _as_head_has_it(model, x_BNC)
    return x if _last(model).layout == "tokens" else tokens_from_map(x)


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Of the last stage's tokens, all of them positions of its map."""
    return ("position",) * _last(model).left


def grid(model: nn.Module, layer: str) -> Grid | None:
    """That of the last block of the layer. Hiera's tokens stand by mask units, and so by rows where one is left of
    each; raises BadInput where more are.
    """
    blocks = token_blocks(_hierarchy(model))
    last = max((place for place, (name, _) in enumerate(blocks) if f"{name}.".startswith(f"{layer}.")), default=-1)
    before = blocks[: last + 1] if layer and last >= 0 else blocks
    if isinstance(model, Hiera):
        height, width = model.mask_spatial_shape
        if height * width != before[-1][1].place.left:
            raise BadInput("tokens stand there by mask units, not by rows of the image; choose a later layer")
        return height, width
    maps = [block.place.behind for _, block in before if block.place.layout != "tokens"]
    return maps[-1] if maps and math.prod(maps[-1]) == before[-1][1].place.left else None


def depth(model: nn.Module) -> int:
    """Blocks of all stages, and what stands between stages."""
    return len(token_blocks(model)) or len(timm_blocks(model))


def input_spec(model: nn.Module) -> ImageSpec:
    """Images of the size that the model was built for, the rest of the preprocessing from timm's data config."""
    return timm_library.image_spec(model, timm_library.configured_size(model))


def _as_it_is(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    return state


_FILTERS: Mapping[type[nn.Module], Callable[..., Mapping[str, Tensor]]] = {
    EfficientFormer: efficientformer.checkpoint_filter_fn,
    EfficientFormerV2: _as_it_is,
    Hiera: hiera.checkpoint_filter_fn,
    MaxxVit: maxxvit.checkpoint_filter_fn,
    TinyVit: tiny_vit.checkpoint_filter_fn,
}


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter, under timm's names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, at what timm does to resample a table
        return dict(_of(_FILTERS, model)(dict(state), library_form(model)))
