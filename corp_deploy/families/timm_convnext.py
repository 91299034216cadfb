"""timm's ConvNeXt family: MLPs behind depthwise convolutions, in stages of ever fewer tokens of more channels.

MLPs of 1x1 convolutions (`conv_mlp`) are linear layers here, see timm_pointwise.py; ConvNeXt V2's norm is one that can
lose channels, see response_norm.py.

Legend: B images, N tokens of a stage, C channels.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from timm.models.convnext import ConvNeXt, ConvNeXtBlock, ConvNeXtStage, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library
from .channel_site import ChannelSite
from .maps import Grid, OnMap, grid_behind, map_from_tokens, tokens_from_map
from .modules import replaced
from .response_norm import ResponseNorm, mean_state
from .site import Site
from .sites import Refusal, Sites
from .steps import Branch, Passage, Step
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import output_ports as output_ports
from .timm_mlps import channel_site, mlp_refusal
from .timm_pointwise import TokenMlpBlock, gamma_of, with_convolutions
from .widths import HeadGeometry

NAME = "timm-convnext"
UNMERGEABLE = "a convolution needs its positions in rows and columns, so none can be merged away"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage by its name, the grid of the map that enters it and that of its blocks."""

    name: str
    module: ConvNeXtStage
    before: Grid
    grid: Grid

    @property
    def downsamples(self) -> bool:
        return not isinstance(self.module.downsample, nn.Identity)

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [(f"{self.name}.blocks.{index}", block) for index, block in enumerate(self.module.blocks)]


def accepts(model: nn.Module) -> bool:
    """Whether it is timm's ConvNeXt, V1 or V2."""
    return isinstance(model, ConvNeXt)


def _convnext(model: nn.Module) -> ConvNeXt:
    assert isinstance(model, ConvNeXt), type(model)
    return model


def _stages(model: nn.Module) -> list[_Stage]:
    """At the size of the model's images."""
    convnext, stages = _convnext(model), list[_Stage]()
    channels, grid = grid_behind(convnext.stem, convnext.in_chans, timm_library.configured_size(model))
    for index, module in enumerate(convnext.stages):
        assert isinstance(module, ConvNeXtStage), module
        stages.append(_Stage(name=f"stages.{index}", module=module, before=grid, grid=grid))
        if stages[-1].downsamples:
            before, (channels, grid) = grid, grid_behind(module.downsample, channels, grid)
            stages[-1] = _Stage(name=f"stages.{index}", module=module, before=before, grid=grid)
    return stages


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for index, stage in enumerate(_convnext(model).stages):
        for place, block in enumerate(stage.get_submodule("blocks").children()):
            yield f"stages.{index}.blocks.{place}", block


def _refusal(block: nn.Module) -> str:
    """Why the MLP of a block can't be reduced, or nothing."""
    if type(block) not in (ConvNeXtBlock, TokenMlpBlock):
        return f"block is {type(block).__name__}, expected timm's ConvNeXtBlock"
    return mlp_refusal(block.get_submodule("mlp"))


def sites(model: nn.Module) -> Sites:
    """The MLPs in the order they run, dense or already reduced."""
    mlps: list[Site] = []
    refused: list[Refusal] = []
    for name, block in _blocks(model):
        mlp = f"{name}.mlp"
        if reason := _refusal(block):
            refused.append(Refusal(name=mlp, reason=reason, sites={mlp: ChannelSite.kind}))
        else:
            mlps.append(channel_site(mlp, block.get_submodule("mlp")))
    return Sites(every=tuple(mlps), refused=tuple(refused))


def _before_mlp(block: nn.Module, grid: Grid) -> nn.Module:
    """Tokens through the depthwise convolution and the norm, which is one of maps where timm's MLP is."""
    convolution, norm = block.get_submodule("conv_dw"), block.get_submodule("norm")
    if isinstance(block, TokenMlpBlock):
        return OnMap(nn.Sequential(convolution, norm), grid)
    return nn.Sequential(OnMap(convolution, grid), norm)


def _step(name: str, block: nn.Module, grid: Grid, read: Tensor | None) -> Step:
    if _refusal(block) or not isinstance(block.get_submodule("shortcut"), nn.Identity):
        return Passage(module=OnMap(block, grid), name=name)
    scale = gamma_of(block)
    return Branch(
        name=f"{name}.mlp",
        norm=_before_mlp(block, grid),
        layer=block.get_submodule("mlp"),
        scale_C=None if scale is None else scale.detach(),
        read=read,
    )


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The blocks in the order they run, and what makes a stage's map of the one before."""
    stages = _stages(model)
    for stage in stages:
        if stage.downsamples:
            yield Passage(module=OnMap(stage.module.downsample, stage.before), name=f"{stage.name}.downsample")
        for name, block in stage.blocks:
            is_last = stage is stages[-1] and block is stage.blocks[-1][1]
            yield _step(name, block, stage.grid, read if is_last else None)


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first stage."""
    assert isinstance(inputs, Tensor), type(inputs)
    return tokens_from_map(_convnext(model).stem(inputs))


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    convnext = _convnext(model)
    x_BCHW = map_from_tokens(x_BNC, _stages(model)[-1].grid)
    return convnext.forward_head(convnext.norm_pre(x_BCHW))


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The last stage's stream before the head, whose norm stands behind the pooling."""
    convnext = _convnext(model)
    return tokens_from_map(convnext.norm_pre(map_from_tokens(x_BNC, _stages(model)[-1].grid)))


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Of the last stage's tokens, all of them positions of its map."""
    height, width = _stages(model)[-1].grid
    return ("position",) * (height * width)


def grid(model: nn.Module, layer: str) -> Grid | None:
    """That of the layer's stage."""
    stages = _stages(model)
    return next((stage.grid for stage in stages if f"{layer}.".startswith(f"{stage.name}.")), stages[-1].grid)


def depth(model: nn.Module) -> int:
    """Blocks of all stages."""
    return sum(1 for _ in _blocks(model))


def input_spec(model: nn.Module) -> ImageSpec:
    """Images of the size of the name's tag or of `img_size`: these models take any."""
    return timm_library.image_spec(model, timm_library.configured_size(model))


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode with its MLPs as timm spells them; there are no heads whose geometry could be chosen."""
    return with_convolutions(replaced(model, sites(model).spelled_out(geometry))).eval().requires_grad_(False)


def own_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under timm's names with those that it has no names for."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, ResponseNorm))
    return dict(state) | {f"{name}.{key}": value for name, norm in norms for key, value in mean_state(norm).items()}


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter, 1x1 convolutions read as the linear layers they are."""
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state), model)
    expected = model.state_dict()

    def is_pointwise(name: str, tensor: Tensor) -> bool:
        return tensor.ndim == 4 and name in expected and expected[name].ndim == 2 and tensor.shape[2:] == (1, 1)

    return {name: each[:, :, 0, 0] if is_pointwise(name, each) else each for name, each in adapted.items()}
