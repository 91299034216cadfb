"""timm's VisionTransformer family: how its models are built, run, prepared for and exported; see timm_sites.py for
where they are reduced, timm_merging.py for merged tokens.

A block is supported when it is the plain pre-norm block (fc1 / act / fc2 and one fused qkv); anything else is refused
with its reason.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import Attention as TimmAttention
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput
from ground.ports import LOGITS, OutputPort
from ground.quantity import shown

from . import timm_merging
from .architecture import MOST_PARAMETERS, Architecture
from .merging import Merging
from .modules import parameters, replaced
from .preprocessing import Preprocessing
from .timm_arguments import refuse_unbounded
from .timm_blocks import MergingBlocks
from .timm_images import ImageSpec
from .timm_names import look_alikes, refuse_reserved, require_local_name
from .timm_sites import require_vit
from .timm_sites import sites as sites
from .timm_sites import steps as steps
from .widths import HeadGeometry

NAME = "timm"
# What hybrids have before their patch embedding's projection: a network of its own, to be told apart in costs.
FIXED_PARTS = ("patch_embed.backbone",)


def accepts(model: nn.Module) -> bool:
    """Whether it is timm's VisionTransformer: ViT, DeiT, DeiT-III, DINO ViTs."""
    return isinstance(model, VisionTransformer)


def last_block(model: nn.Module) -> nn.Module:
    """The block whose output is the last residual stream."""
    blocks = require_vit(model).blocks
    block: nn.Module = blocks.end if isinstance(blocks, MergingBlocks) else blocks[-1]
    return block


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """What each token of the residual stream is, in order."""
    vit = require_vit(model)
    prefix = ["class"] * int(vit.has_class_token) + ["register"] * vit.num_reg_tokens
    if vit.num_prefix_tokens > len(prefix):
        prefix.insert(1, "distillation")
    return (*prefix, *["patch"] * int(vit.patch_embed.num_patches))


def classes(model: nn.Module) -> int:
    """How many classes the model tells apart; 0 for one that has no classifier."""
    return int(require_vit(model).num_classes)


def token_weights(model: nn.Module, inputs: Inputs) -> None:
    """Every token of an image counts alike."""


def embedded(model: nn.Module, inputs: Inputs) -> Tensor:
    """The residual stream [B,N,C] that enters the first block."""
    vit = require_vit(model)
    assert isinstance(inputs, Tensor), type(inputs)
    x_BNC: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(inputs))))
    return x_BNC


def finished(model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
    """The model's output for the residual stream behind its last block, in which source tokens are at `sources_BM`."""
    vit = require_vit(model)
    outputs: Tensor = vit.forward_head(vit.norm(timm_merging.unmerged_for_head(vit, x_BNC, sources_BM)))
    return outputs


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode whose attention is spelled MatMul-Softmax-MatMul with the scale on q alone and softmax in
    float32.

    `geometry` replaces that of heads whose q/k and v widths differ; None keeps each as it is.
    """
    every = sites(model)
    plain: dict[str, nn.Module] = {site.name: site.plain(geometry) for site in every.heads}
    copied = replaced(model, plain | {name: new for site in every.channels for name, new in site.plain().items()})
    for module in copied.modules():
        if isinstance(module, TimmAttention):
            module.fused_attn = False  # type: ignore[misc]  # final for TorchScript only
    return copied.eval().requires_grad_(False)


def with_merging(model: nn.Module, merging: Merging | None) -> nn.Module:
    """A copy in eval mode that merges tokens so, or none. Raises BadInput where it can't."""
    return timm_merging.with_merging(require_vit(model), merging)


def merging_of(model: nn.Module) -> Merging | None:
    """How the model merges tokens, None for one that doesn't."""
    return timm_merging.merging_of(require_vit(model))


def merging_refusal(model: nn.Module) -> str:
    """Why its tokens can't be merged, or nothing."""
    return timm_merging.merging_refusal(require_vit(model))


def depth(model: nn.Module) -> int:
    """How many blocks the model has."""
    return len(require_vit(model).blocks)


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by timm's own filter: older and other projects' names are mapped, and
    position embeddings and patches of another size resampled as timm does for this name.
    """
    vit = require_vit(model)
    flexible = any(word in architecture(vit) for word in ("flexi", "radio"))
    how: dict[str, Any] = {"interpolation": "bilinear", "antialias": False} if flexible else {}
    # DeiT-III's own names, gamma_1 and gamma_2, are no other model's.
    adapted: dict[str, Tensor] = checkpoint_filter_fn(dict(state), vit, adapt_layer_scale=True, **how)
    return adapted


def _timm_config(model: nn.Module) -> dict[str, Any]:
    config: Any = require_vit(model).pretrained_cfg
    return dict(config)


def architecture(model: nn.Module) -> str:
    """timm's name of the model as it was built, without its tag."""
    return str(_timm_config(model).get("architecture") or "")


def input_and_classes(model: nn.Module) -> dict[str, Any]:
    """The arguments that a name's tag or timm's defaults decided, spelled out: classes, image size and channels."""
    vit = require_vit(model)
    size = {"num_classes": vit.num_classes, "img_size": list(vit.patch_embed.img_size)}
    return size if vit.in_chans == 3 else size | {"in_chans": vit.in_chans}


def pretrained_tag(model: nn.Module) -> str:
    """The tag whose configuration timm took for this name; empty where the name has none."""
    return str(_timm_config(model).get("tag") or "")


def unused(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the weights that a model of this architecture may have and this one was built without."""
    vit = require_vit(model)
    classifiers = _timm_config(vit).get("classifier") or "head"
    heads = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    without_head = tuple(f"{name}." for name in heads) if vit.num_classes == 0 else ()
    return without_head + (("attn_pool.",) if vit.attn_pool is None else ())


def set_preprocessing_(model: nn.Module, preprocessing: Preprocessing) -> None:
    """Let a model just built carry this evaluation preprocessing, where timm looks for it, in all its copies too."""
    vit = require_vit(model)
    config: Any = {**_timm_config(vit), **preprocessing.settings}
    vit.pretrained_cfg = config


def input_spec(model: nn.Module) -> ImageSpec:
    """Image shape from the patch embedding, the rest of the preprocessing from timm's data config of the model."""
    vit = require_vit(model)
    height, width = vit.patch_embed.img_size
    config = dict(timm.data.resolve_model_data_config(model))
    config["input_size"] = (vit.in_chans, height, width)
    return ImageSpec(shape=(vit.in_chans, height, width), config=config)


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    """Logits, or the pooled features of a model that has no classifier."""
    return (LOGITS if classes(model) else OutputPort(name=LOGITS.name, role="embedding"),)


def _built(architecture: Architecture) -> nn.Module:
    """The model on torch's default device. Any error is one of the arguments: timm checks few of them."""
    try:
        model: nn.Module = timm.create_model(architecture.name, pretrained=False, **architecture.kwargs)
    except MemoryError:
        raise
    except Exception as error:
        raise BadInput(
            f"--model {shown(architecture.name)} with arguments {shown(str(dict(architecture.kwargs)))}: timm can't "
            f"build it ({type(error).__name__}: {str(error)[:300]}); {look_alikes(architecture.name)}; "
            "a directory written by corp-deploy works too"
        ) from None
    return model


def build(architecture: Architecture) -> nn.Module:
    """The timm model with its initial weights, in eval mode. Raises BadInput for an unknown name or arguments, and for
    more parameters than are built.
    """
    require_local_name(architecture.name)
    refuse_reserved(architecture.kwargs)
    refuse_unbounded(architecture.kwargs)
    with torch.device("meta"):
        count = parameters(_built(architecture))
    if count > MOST_PARAMETERS:
        raise BadInput(
            f"--model {shown(architecture.name)} with these arguments has {count:,} parameters, "
            f"{MOST_PARAMETERS:,} at most are built; check --model-kwargs"
        )
    model = _built(architecture).eval()
    if accepts(model):
        set_preprocessing_(model, architecture.preprocessing)
    return model


def beside(model: nn.Module) -> Mapping[str, str]:
    """Nothing: how images are prepared is a few numbers of config.json."""
    return {}


def take_beside_(model: nn.Module, directory: Path) -> None:
    """Nothing stands there."""
