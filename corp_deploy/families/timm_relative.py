"""timm's families of relative position bias: Beit (BEiT, BEiT v2) and VisionTransformerRelPos.

Their attention is made one that knows where tokens stand to each other (timm_relative_blocks.py), for the one image
size that the model is built for. What is added to the scores leaves queries and keys free to be reduced.
"""

import warnings
from collections.abc import Mapping

import torch
from timm.layers import resize_rel_pos_bias_table
from timm.models import beit
from timm.models.beit import Beit
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import grid as grid
from .timm_library import output_ports as output_ports
from .timm_placed_sites import sites as sites
from .timm_placed_sites import steps as steps
from .timm_relative_blocks import TABLE, Relative, patches
from .timm_relative_blocks import own_state as own_state

NAME = "timm-relative"
UNMERGEABLE = "scores are added to by where two tokens stand to each other, and a merged token would stand nowhere"


def accepts(model: nn.Module) -> bool:
    return isinstance(model, Relative)


def _relative(model: nn.Module) -> Relative:
    assert isinstance(model, Relative), type(model)
    return model


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """What each token of the residual stream is, in order."""
    relative = _relative(model)
    return (*["class"] * relative.num_prefix_tokens, *["patch"] * patches(relative).num_patches)


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    relative = _relative(model)
    x_BNC: Tensor = relative.patch_embed(inputs)
    if relative.cls_token is not None:
        x_BNC = torch.cat((relative.cls_token.expand(x_BNC.shape[0], -1, -1), x_BNC), dim=1)
    if isinstance(relative, Beit) and relative.pos_embed is not None:
        x_BNC = x_BNC + relative.pos_embed
    return x_BNC


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """A stream behind the last norm, which is the identity where the norm stands behind the pooling."""
    x_BNC = _relative(model).norm(x_BNC)
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    outputs: Tensor = _relative(model).forward_head(normed(model, x_BNC))
    return outputs


def depth(model: nn.Module) -> int:
    return len(_relative(model).blocks)


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    height, width = patches(_relative(model)).img_size
    return timm_library.image_spec(model, (height, width))


def _resized(table_LH: Tensor, relative: Relative) -> Tensor:
    """A table of another image size as timm resamples it."""
    height, width = patches(relative).grid_size
    # BEiT's three relations of the class token, which timm's other model has where it has one.
    extra = 3 if isinstance(relative, Beit) or relative.num_prefix_tokens else 0
    shape = ((2 * height - 1) * (2 * width - 1) + extra, table_LH.shape[1])
    if table_LH.shape == shape and height == width:
        return table_LH
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, at what timm does there
        resized: Tensor = resize_rel_pos_bias_table(table_LH, new_window_size=(height, width), new_bias_shape=shape)
    return resized


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter, under timm's names; tables are brought here as that
    does it, which looks for modules of timm's.
    """
    relative = _relative(model)
    tables = {name: _resized(value, relative) for name, value in state.items() if name.endswith(TABLE)}
    others = {name: value for name, value in state.items() if name not in tables}
    if isinstance(relative, Beit):
        others = beit.checkpoint_filter_fn(others, relative)
    return others | tables
