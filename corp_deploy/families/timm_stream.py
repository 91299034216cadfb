"""Another order of the channels of a VisionTransformer's residual stream: all that writes it, all that reads it, and
what works channel by channel on the way take it, so that the model's outputs are what they were.

Legend: C channels of the stream.
"""

import re

import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .modules import replaced
from .named_outputs import NamedOutputs
from .timm_vit import accepts, classes

# Of parameters, by their names, the axis that runs along the stream; None where none does.
_AXES: tuple[tuple[str, int | None], ...] = (
    (r"cls_token|reg_token|dist_token|pos_embed", -1),
    (r"patch_embed\.(proj|norm)\.(weight|bias)", 0),
    (r"(norm_pre|norm|fc_norm)\.(weight|bias)", 0),
    (r"blocks\.\d+\.(norm1|norm2)\.(weight|bias)", 0),
    (r"blocks\.\d+\.(ls1|ls2)\.gamma", 0),
    (r"blocks\.\d+\.(attn\.proj|mlp\.fc2)\.(weight|bias)", 0),
    (r"blocks\.\d+\.(attn\.qkv|mlp\.(fc1|fc1_g|fc1_x))\.weight", 1),
    (r"blocks\.\d+\.(attn\.qkv|mlp\.(fc1|fc1_g|fc1_x))\.bias", None),
    (r"blocks\.\d+\.attn\.(q_norm|k_norm)\.(weight|bias)", None),
    (r"(head|head_dist)\.weight", 1),
    (r"(head|head_dist)\.bias", None),
)
_READERS = re.compile(r"blocks\.(\d+)\.(attn\.qkv|mlp\.(?:fc1|fc1_g|fc1_x))\.weight")


def _axis(name: str) -> int | None:
    """Raises BadInput for a parameter that nothing is known of."""
    for pattern, axis in _AXES:
        if re.fullmatch(pattern, name):
            return axis
    raise BadInput(
        f"--sparse-permute stream: whether {name} reads or writes the stream isn't known; give --sparse-permute inside"
    )


def _require_reorderable(model: nn.Module) -> None:
    if not accepts(model) or isinstance(model, NamedOutputs) or not classes(model):
        raise BadInput(
            f"--sparse-permute stream: {type(model).__name__} is no plain ViT with a classifier of its own, whose "
            "writers and readers of the stream are all known, and whose outputs aren't the stream; give "
            "--sparse-permute inside"
        )


def stream_scores(model: nn.Module) -> Tensor:
    """By channel of the stream sum_o (w_oj gamma_j)^2 over all that read it in blocks [C], float64: behind a norm of
    scale gamma a channel's variance is about gamma^2.
    """
    _require_reorderable(model)
    parameters, scores = dict(model.named_parameters()), list[Tensor]()
    for name, weight_OC in parameters.items():
        if found := _READERS.fullmatch(name):
            norm = f"blocks.{found[1]}.{'norm1' if found[2].startswith('attn') else 'norm2'}.weight"
            gain = parameters[norm].detach().double() if norm in parameters else 1.0
            scores.append((weight_OC.detach().double() * gain).square().sum(dim=0))
    return torch.stack(scores).sum(dim=0)


@torch.no_grad()
def stream_reordered(model: nn.Module, order_C: Tensor) -> nn.Module:
    """A copy whose stream has its channels in this order. Raises BadInput where that isn't known to change nothing."""
    _require_reorderable(model)
    copied = replaced(model, {})
    for name, parameter in copied.named_parameters():
        axis = _axis(name)
        if axis is not None:
            parameter.copy_(parameter.index_select(axis % parameter.ndim, order_C))
    return copied
