"""timm's convolutional networks: rows of convolutions beside shortcuts, in stages of ever fewer tokens.

Their blocks are made rows of convolutions without norms (timm_convnets.py), for the one image size that the model is
built for.

Legend: B images, N tokens of a stage, C channels.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library
from .conv_block import ConvBlock, ConvRow
from .coupled_site import CoupledSite
from .coupling import couplings
from .maps import Grid, OnMap, map_from_tokens, tokens_from_map
from .named_outputs import NamedOutputs
from .sites import Sites
from .steps import Branch, Nothing, Passage, Step
from .timm_conv_sites import conv_sites
from .timm_convnets import ConvNet, blocks_of, head_of, maps_in, plan_of
from .timm_convnets import own_state as own_state
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import output_ports as output_ports

NAME = "timm-convnet"
UNMERGEABLE = "a convolution needs its positions in rows and columns, so none can be merged away"


def accepts(model: nn.Module) -> bool:
    return isinstance(model, ConvNet)


def _network(model: nn.Module) -> Any:
    """Of which timm's classes have the same methods."""
    assert isinstance(model, ConvNet), type(model)
    return model


def sites(model: nn.Module) -> Sites:
    """The rows of convolutions in the order they run, dense or already reduced; those of deep stems first."""
    every, refused = conv_sites(model)
    coupled = dict(_couplings(model))
    return Sites(
        every=every,
        refused=refused,
        coupled=tuple(each for each in coupled.values() if isinstance(each, CoupledSite)),
        uncoupled={name: each for name, each in coupled.items() if isinstance(each, str)},
    )


def _couplings(model: nn.Module) -> Iterator[tuple[str, CoupledSite | str]]:
    """None of a model that gives streams by name."""
    if isinstance(model, NamedOutputs):
        return iter(())
    plan = plan_of(model)
    around = [[(name, model.get_submodule(name)) for name in names] for names in (plan.stem, plan.tail, head_of(model))]
    return couplings([*around[0], *blocks_of(model), *around[1], *around[2]])


def _steps_of(name: str, block: ConvBlock) -> Iterator[Step]:
    shortcut: nn.Module | None = None
    if not block.adds:
        shortcut = Nothing(block.left[0] * block.left[1], block.last.out_channels)
    elif not isinstance(block.shortcut, nn.Identity):
        shortcut = OnMap(block.shortcut, block.grid)
    layer = ConvRow(block.row, block.grid)
    yield Branch(name=name, norm=nn.Identity(), layer=layer, scale_C=None, shortcut=shortcut)
    if not isinstance(block.act, nn.Identity):
        yield Passage(module=block.act, name=f"{name}.{block.act_name}")


def _stem_steps(model: nn.Module) -> Iterator[Step]:
    """What stands in front of the blocks, where it has a row of convolutions of its own."""
    names = plan_of(model).stem
    grid = timm_library.configured_size(model)
    for name in names:
        part = model.get_submodule(name)
        if isinstance(part, ConvBlock):
            yield from _steps_of(name, part)
            grid = part.left
        elif not isinstance(part, nn.Identity):
            yield Passage(module=OnMap(part, grid), name=name)


def _has_steps(model: nn.Module) -> bool:
    return isinstance(model.get_submodule(plan_of(model).stem[0]), ConvBlock)


def steps(model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
    """The blocks in the order they run, behind the stem where that has steps of its own."""
    if _has_steps(model):
        yield from _stem_steps(model)
    before = maps_in(model).before
    for name, block in blocks_of(model):
        if isinstance(block, ConvBlock):
            yield from _steps_of(name, block)
        else:
            yield Passage(module=OnMap(block, before[name]), name=name)


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first step: the image where the stem has steps."""
    assert isinstance(inputs, Tensor), type(inputs)
    if _has_steps(model):
        return tokens_from_map(inputs)
    x = inputs
    for name in plan_of(model).stem:
        x = model.get_submodule(name)(x)
    return tokens_from_map(x)


def _last_grid(model: nn.Module) -> Grid:
    return maps_in(model).behind[blocks_of(model)[-1][0]]


def _behind(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The map behind what stands between the last block and the head."""
    x = map_from_tokens(x_BNC, _last_grid(model))
    for name in plan_of(model).tail:
        x = model.get_submodule(name)(x)
    return x


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    outputs: Tensor = _network(model).forward_head(_behind(model, x_BNC))
    return outputs


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The last stage's map before the head's pooling."""
    return tokens_from_map(_behind(model, x_BNC))


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Of the last stage's tokens, all of them positions of its map."""
    height, width = _last_grid(model)
    return ("position",) * (height * width)


def grid(model: nn.Module, layer: str) -> Grid | None:
    """Of the map behind the layer, that of the last block without one."""
    return maps_in(model).behind.get(layer, _last_grid(model))


def depth(model: nn.Module) -> int:
    """Blocks of all stages."""
    return len(blocks_of(model))


def input_spec(model: nn.Module) -> ImageSpec:
    """Images of the size that the model was built for, the rest of the preprocessing from timm's data config."""
    return timm_library.image_spec(model, timm_library.configured_size(model))
