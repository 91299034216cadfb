"""timm's MlpMixer family: MLP-Mixer, gMixer, ResMLP and gMLP, whose images have one size.

A token-mixing MLP has tokens for its channels: its hidden channels are a site like any other's, whose rows are the
channels of the stream. gMLP's spatial gating is refused; ResMLP's token mixer is one linear layer and has no hidden
channels.

Legend: B images, N tokens, C channels.
"""

from collections.abc import Iterator, Mapping

from timm.models.mlp_mixer import MixerBlock, MlpMixer, ResBlock, SpatialGatingBlock, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library
from .channel_site import ChannelSite
from .site import Site
from .sites import Refusal, Sites
from .steps import Branch, Passage, Step
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import grid as grid
from .timm_library import output_ports as output_ports
from .timm_mlps import channel_site, mlp_refusal

NAME = "timm-mixer"
UNMERGEABLE = "a layer that mixes tokens has weights for each place of theirs, so none can be merged away"
_GATED = (
    "a spatial gating unit (gMLP) normalises half of its hidden channels together, mixes them over the tokens and "
    "multiplies them with the other half, so channels can't be left out one by one"
)


class Turned(nn.Module):
    """A layer of tokens in the place of one of channels: [B,N,C] -> [B,N,C]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.layer(x.mT)
        return mixed.mT


def accepts(model: nn.Module) -> bool:
    return isinstance(model, MlpMixer)


def _mixer(model: nn.Module) -> MlpMixer:
    assert isinstance(model, MlpMixer), type(model)
    return model


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"blocks.{index}", block) for index, block in enumerate(_mixer(model).blocks)]


def _mlps(block: nn.Module) -> tuple[str, ...]:
    return ("mlp_tokens", "mlp_channels") if isinstance(block, MixerBlock) else ("mlp_channels",)


def _refusal(block: nn.Module, mlp: str) -> str:
    if isinstance(block, SpatialGatingBlock):
        return _GATED
    if type(block) not in (MixerBlock, ResBlock):
        return f"block is {type(block).__name__}, expected timm's MixerBlock or ResBlock"
    return mlp_refusal(block.get_submodule(mlp))


def sites(model: nn.Module) -> Sites:
    """The MLPs over tokens and over channels in the order they run, dense or already reduced."""
    mlps: list[Site] = []
    refused: list[Refusal] = []
    for block_name, block in _blocks(model):
        for mlp in _mlps(block):
            name = f"{block_name}.{mlp}"
            if reason := _refusal(block, mlp):
                refused.append(Refusal(name=name, reason=reason, sites={name: ChannelSite.kind}))
            else:
                mlps.append(channel_site(name, block.get_submodule(mlp)))
    return Sites(every=tuple(mlps), refused=tuple(refused))


def _of_mixer(name: str, block: MixerBlock, read: Tensor | None) -> Iterator[Step]:
    yield Branch(name=f"{name}.mlp_tokens", norm=block.norm1, layer=block.mlp_tokens, scale_C=None, turned=True)
    yield Branch(name=f"{name}.mlp_channels", norm=block.norm2, layer=block.mlp_channels, scale_C=None, read=read)


def _of_resmlp(name: str, block: ResBlock, read: Tensor | None) -> Iterator[Step]:
    mixer, scales = Turned(block.linear_tokens), (block.ls1.detach(), block.ls2.detach())
    yield Branch(name=f"{name}.linear_tokens", norm=block.norm1, layer=mixer, scale_C=scales[0])
    yield Branch(name=f"{name}.mlp_channels", norm=block.norm2, layer=block.mlp_channels, scale_C=scales[1], read=read)


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The branches of the blocks in the order they run; gMLP's blocks whole."""
    blocks = _blocks(model)
    for name, block in blocks:
        counted = read if block is blocks[-1][1] else None
        if isinstance(block, MixerBlock):
            yield from _of_mixer(name, block, counted)
        elif isinstance(block, ResBlock):
            yield from _of_resmlp(name, block, counted)
        else:
            yield Passage(module=block, name=name)


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    assert isinstance(inputs, Tensor), type(inputs)
    x_BNC: Tensor = _mixer(model).stem(inputs)
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    mixer = _mixer(model)
    return mixer.forward_head(mixer.norm(x_BNC))


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """A stream behind the last norm."""
    x_BNC = _mixer(model).norm(x_BNC)
    return x_BNC


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    return ("patch",) * int(_mixer(model).stem.num_patches)


def depth(model: nn.Module) -> int:
    return len(_blocks(model))


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    size = _mixer(model).stem.img_size
    assert size is not None, "a model that mixes tokens has one image size"
    return timm_library.image_spec(model, (size[0], size[1]))


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter, which knows the names that ResMLP was published with."""
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state), _mixer(model))
    return adapted
