"""timm's Eva family: EVA, EVA-02, DINOv3 and its like, rotary ViTs, Perception Encoder, Sapiens 2.

Their attention is made one that knows its positions (timm_placed.py), for the one image size that the model is built
for. Queries and keys that positions turn lose whole planes.
"""

from collections.abc import Mapping

from timm.models.eva import Eva, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs

from . import timm_library
from .timm_images import ImageSpec
from .timm_library import build as build
from .timm_library import classes as classes
from .timm_library import grid as grid
from .timm_library import output_ports as output_ports
from .timm_placed import own_state as of_placed_blocks
from .timm_placed import placed_blocks
from .timm_placed_sites import sites as sites
from .timm_placed_sites import steps as steps

NAME = "timm-eva"


def accepts(model: nn.Module) -> bool:
    return isinstance(model, Eva)


def _eva(model: nn.Module) -> Eva:
    assert isinstance(model, Eva), type(model)
    return model


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """What each token of the residual stream is, in order."""
    eva = _eva(model)
    classes = int(eva.cls_token is not None)
    registers = eva.num_prefix_tokens - classes
    return (*["class"] * classes, *["register"] * registers, *["patch"] * int(eva.patch_embed.num_patches))


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    eva = _eva(model)
    assert isinstance(inputs, Tensor), type(inputs)
    x_BNC, _ = eva._pos_embed(eva.patch_embed(inputs))
    normed_BNC: Tensor = eva.norm_pre(x_BNC)
    return normed_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block."""
    eva = _eva(model)
    outputs: Tensor = eva.forward_head(eva.norm(x_BNC))
    return outputs


def normed(model: nn.Module, x_BNC: Tensor) -> Tensor:
    """A stream behind the last norm, which is the identity where the norm stands behind the pooling."""
    x_BNC = _eva(model).norm(x_BNC)
    return x_BNC


def merging_refusal(model: nn.Module) -> str:
    turned = any(site.rotary is not None for site in sites(model).heads)
    if turned:
        return "positions turn the queries and keys of every block, and a merged token would stand at none"
    return "blocks that merge are those of timm's VisionTransformer, these are Eva's"


def depth(model: nn.Module) -> int:
    return len(_eva(model).blocks)


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    height, width = _eva(model).patch_embed.img_size
    return timm_library.image_spec(model, (height, width))


def _with_parts_of_bias(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of weights under Meta's names of DINOv3 a bias of queries, keys and values is taken apart as in timm's, or left
    out where the model has none: timm's filter looks for parts of the model that are here in one.
    """
    parts = dict(state)
    for name, block in placed_blocks(model):
        bias = parts.pop(f"{name}.attn.qkv.bias", None)
        if bias is not None and "attn.qkv.bias" in block.state_dict():
            parts[f"{name}.attn.q_bias"], _, parts[f"{name}.attn.v_bias"] = bias.chunk(3)
    return parts


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter, under timm's names."""
    if "storage_tokens" in state:
        state = _with_parts_of_bias(model, state)
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state), _eva(model))
    return adapted


def own_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state under timm's names as this model's, whose attention has one layer for queries, keys and values."""
    ours = of_placed_blocks(model, state)
    freqs_2LHP = ours.pop("rope.freqs", None)
    for index, (name, _) in enumerate(placed_blocks(model)):
        if freqs_2LHP is not None:
            ours[f"{name}.attn.rotary.freqs_2HP"] = freqs_2LHP[:, index]
    return ours


def unused(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the weights that a model of this architecture may have and this one was built without."""
    return timm_library.unused(model) + (("attn_pool.",) if _eva(model).attn_pool is None else ())
