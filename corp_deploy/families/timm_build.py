"""timm's models from arguments that are plain JSON values, with what timm takes as code said in them too.

`norm_layer` may be {"name": "layernorm", "eps": 1e-12}, `mlp_layer` one of MLPS, and `head` one of HEADS, which timm's
own heads are not.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import msgspec
import timm
import torch
from timm.layers import SwiGLUPacked
from timm.layers.create_norm import get_norm_layer
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

Head = Literal["projection", "class and patches"]
HEADS: tuple[Head, ...] = get_args(Head)
"""projection: a linear layer without a bias, whose outputs are an embedding. class and patches: a classifier of the
class token beside the mean of the patches, as DINOv2 evaluates (arXiv 2304.07193, section 7.1)."""

MLPS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType({"swiglu_packed": SwiGLUPacked})


class _Norm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    eps: float


class ClassAndPatches(VisionTransformer):
    """A VisionTransformer whose classifier reads the class token and the mean of the patch tokens, side by side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Average pooling is what says of timm's models that patches are read; its own norm stays before it.
        super().__init__(*args, **{**kwargs, "global_pool": "avg", "fc_norm": False})
        if self.num_classes:
            self.head = nn.Linear(2 * self.embed_dim, self.num_classes)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Normalised tokens [B,N,C] -> logits [B,classes], or what they are made of [B,2C]."""
        features = torch.cat([x[:, 0], x[:, self.num_prefix_tokens :].mean(dim=1)], dim=1)
        logits: Tensor = features if pre_logits else self.head(self.head_drop(features))
        return logits


def _spelled(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as timm takes them. Raises ValueError for a norm that is none."""
    spelled = {key: value for key, value in kwargs.items() if key != "head"}
    if isinstance(spelled.get("norm_layer"), Mapping):
        norm = msgspec.convert(spelled["norm_layer"], _Norm)
        spelled["norm_layer"] = partial(get_norm_layer(norm.name), eps=norm.eps)
    if isinstance(spelled.get("mlp_layer"), str):
        spelled["mlp_layer"] = MLPS[spelled["mlp_layer"]]
    return spelled


def built(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """The model on torch's default device with its initial weights. Any error is one of the arguments."""
    head, spelled = kwargs.get("head"), _spelled(kwargs)
    if head not in (None, *HEADS):
        raise ValueError(f"head is {head!r:.60}, expected one of {', '.join(HEADS)}")
    if head == "class and patches":
        reading: nn.Module = build_model_with_cfg(ClassAndPatches, name, pretrained=False, **spelled)
        return reading
    model: nn.Module = timm.create_model(name, pretrained=False, **spelled)
    if head == "projection":
        assert isinstance(model, VisionTransformer), type(model)
        model.head = nn.Linear(model.embed_dim, model.num_classes, bias=False)
        model.num_classes = 0
    return model
