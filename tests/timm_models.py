"""Small models of timm's, all that tests take of it but networks of convolutions and mixers: every form of its
VisionTransformer, of its Eva, attention that adds to scores by where tokens stand or mixes them over the heads, and
hierarchies, whose stages change layout, size and channels.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.family import image_spec
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny

Forms = Mapping[str, tuple[str, dict[str, Any]]]
SMALL: dict[str, Any] = {
    "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7, "img_size": 32, "patch_size": 8
}  # fmt: skip
SCALED = SMALL | {"init_values": 0.3}
SWIN: dict[str, Any] = {
    "img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "mlp_ratio": 2.0, "num_classes": 7
}  # fmt: skip
V1, V2, _TINY = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "vit_tiny_patch16_224"
_IMAGES: Mapping[str, Any] = {"img_size": 64, "num_classes": 7}
_WINDOWS: Mapping[str, Any] = {
    **_IMAGES,
    "stem_width": [16, 16],
    "transformer_window_size": [4, 4],
    "transformer_grid_size": [4, 4],
    "transformer_dim_head": 16,
}
_COATNET: Mapping[str, Any] = {
    **_IMAGES, "embed_dim": [16, 32, 48], "depths": [1, 2, 1], "block_type": ["C", "T", "T"], "stem_width": [16, 16],
    "transformer_dim_head": 16,
}  # fmt: skip
VITS: Forms = {
    "class token": (_TINY, SMALL),
    "mean": (_TINY, SMALL | {"global_pool": "avg"}),
    "mean without a class token": (_TINY, SMALL | {"global_pool": "avg", "class_token": False, "fc_norm": False}),
    "maximum": (_TINY, SMALL | {"global_pool": "max"}),
    "mean and maximum": (_TINY, SMALL | {"global_pool": "avgmax"}),
    "attention pool": ("vit_base_patch16_siglip_224", SMALL),
    "attention pool without weights": (_TINY, SMALL | {"global_pool": "prr"}),
    "no pool": (_TINY, SMALL | {"global_pool": ""}),
    "no classes": (_TINY, SMALL | {"num_classes": 0}),
    "registers": ("vit_small_patch14_reg4_dinov2", SMALL),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "any image size": (_TINY, SMALL | {"dynamic_img_size": True}),
    "norm before": ("vit_base_patch16_clip_quickgelu_224", SMALL),
    "layer scale": ("deit3_small_patch16_224", SMALL | {"init_values": 0.1}),
    "q/k norm": (_TINY, SMALL | {"qk_norm": True}),
    # Its stem gives 384 channels; all else is as small as that allows.
    "gate behind a norm": (
        "vitamin_small_224",
        SMALL | {"embed_dim": 384, "num_heads": 24, "patch_size": 1, "mlp_ratio": 0.5},
    ),
    "packed gate": ("vit_giant_patch14_dinov2", SMALL | {"mlp_ratio": 4.0, "init_values": 0.1}),
    "gate apart": ("aimv2_large_patch14_224", SMALL | {"mlp_ratio": 2.0}),
    "residual post-norm": ("vit_base_patch16_rpn_224", SMALL | {"init_values": 0.5}),
    "side by side": ("vit_small_patch16_18x2_224", SMALL | {"init_values": 0.1}),
    "norms inside": ("beit3_base_patch16_224", SMALL),
    "difference of softmaxes": ("vit_dwee_patch16_reg1_gap_256", SMALL | {"init_values": 0.1}),
    "one layer for all": ("vit_base_patch16_xp_224", SMALL),
    "one layer for all, a difference": ("vit_dpwee_patch16_reg1_gap_256", SMALL),
}
EVAS: Forms = {
    "neighbours turned, packed gate": ("eva02_tiny_patch14_224", SMALL),
    "turned, norms inside": ("eva02_base_patch16_clip_224", SMALL),
    "no positions in attention": ("eva_giant_patch14_224", SMALL | {"mlp_ratio": 4.0}),
    "norms behind": ("eva02_enormous_patch14_clip_224", SMALL | {"mlp_ratio": 4.0}),
    "halves turned, registers": ("vit_small_plus_patch16_dinov3", SCALED),
    "halves turned, biases": ("vit_small_patch16_dinov3_qkvb", SCALED),
    "learned angles": ("vit_base_patch16_rope_mixed_ape_224", SCALED),
    "turned, attention pool": ("vit_pe_core_base_patch16_224", SMALL),
    "q/k norm, groups": ("vit_base_patch16_sapiens2", SCALED | {"num_kv_heads": (1, 3)}),
}
BIASED: Forms = {
    "windows": (V1, SWIN),  # 2 x 2 windows of 7 x 7, then one
    "padding": (V1, SWIN | {"img_size": (40, 64), "window_size": (4, 7)}),  # maps of 10 x 16, then of 5 x 8
    "cosines": (V2, SWIN | {"img_size": (40, 64), "window_size": 8}),  # likewise
    "tables": ("beit_base_patch16_224", SCALED),
    "tables, one of them for all blocks": ("beitv2_base_patch16_224", SCALED | {"use_shared_rel_pos_bias": True}),
    "networks": ("vit_relpos_base_patch16_clsgap_224", SCALED | {"rel_pos_type": "mlp_swin"}),
    "a network for all blocks, norms behind": ("vit_relpos_small_patch16_rpn_224", SMALL | {"shared_rel_pos": True}),
    "talking heads": ("cait_xxs24_224", SCALED),
}
HIERARCHIES: Forms = {
    # Mask units of 8 x 8 tokens, of 4 x 4 behind the first stage, then all tokens see each other.
    "hiera": ("hiera_tiny_224", {**_IMAGES, "embed_dim": 16, "num_heads": 1, "stages": [1, 2, 1, 1]}),
    "hiera_abswin": (
        "hiera_small_abswin_256",
        {**_IMAGES, "img_size": [64, 96], "embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1], "init_values": 0.5},
    ),
    "maxvit_tf": (
        "maxvit_tiny_tf_224",
        {**_WINDOWS, "embed_dim": [32, 48], "depths": [1, 1], "block_type": ["M", "M"], "head_hidden_size": 32},
    ),
    "maxxvit": (
        "maxxvit_rmlp_nano_rw_256",
        {
            **_WINDOWS,
            "embed_dim": [32, 64],
            "depths": [1, 1],
            "block_type": ["M", "M"],
            "conv_init_values": 0.5,
            "transformer_init_values": 0.5,
        },
    ),
    "maxvit_pm": (
        "maxvit_tiny_pm_256",
        {**_WINDOWS, "embed_dim": [32, 64], "depths": [1, 1], "block_type": ["PM", "PM"]},
    ),
    "coatnet": ("coatnet_0_rw_224", {**_COATNET}),
    "coatnext": ("coatnext_nano_rw_224", {**_COATNET, "conv_init_values": 0.5, "transformer_init_values": 0.5}),
    # Windows of 4 of maps of 8, of 3 of maps of 4, which needs padding, and of 2 of a map of 2.
    "tiny_vit": (
        "tiny_vit_5m_224",
        {
            **_IMAGES,
            "embed_dims": [16, 32, 48, 64],
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 2, 3, 4],
            "window_sizes": [4, 4, 3, 2],
        },
    ),
    # Whose attention is for 7 x 7 tokens alone.
    "efficientformer": (
        "efficientformer_l1",
        {
            "embed_dims": [16, 24, 32, 160],
            "depths": [1, 1, 1, 2],
            "num_vit": 1,
            "mlp_ratios": 2,
            "num_classes": 7,
            "layer_scale_init_value": 0.5,
        },
    ),
    "efficientformer_v2": (
        "efficientformerv2_s0",
        {
            **_IMAGES, "embed_dims": [16, 24, 32, 48], "depths": [1, 1, 2, 2], "num_vit": 1, "mlp_ratios": 3,
            "layer_scale_init_value": 0.5,
        },
    ),
}  # fmt: skip
FORMS: Forms = {**VITS, **EVAS, **BIASED, **HIERARCHIES}
TURNED = tuple(form for form in EVAS if form not in ("no positions in attention", "norms behind", "q/k norm, groups"))
TIED = ("hiera", "maxvit_tf", "coatnext", "tiny_vit")
"""Of whose random weights the loop gains little: on which side of a tie the choice of a ridge falls is rounding."""
NUMERIC: Mapping[str, str] = {
    "class token": "heads and MLPs behind a norm, added to one stream",
    "attention pool": "a pool of attention, whose query is a weight",
    "q/k norm": "norms of queries and keys: values alone are narrowed",
    "gate apart": "an MLP whose channels are products of two layers",
    "residual post-norm": "a norm behind the layer that reads a site",
    "side by side": "two attentions and two MLPs that read one tensor, with layer scale",
    "one layer for all, a difference": "one layer for q, k, v and the MLP; two softmaxes, one subtracted",
    "turned, norms inside": "planes of neighbours that rotary embeddings turn; norms behind heads and gates",
    "halves turned, biases": "planes of halves, biases of queries",
    "q/k norm, groups": "keys and values that groups of queries share",
    "padding": "shifted windows with padding, tables of biases",
    "cosines": "cosines of queries and keys, a network of biases",
    "talking heads": "scores mixed over heads, class attention",
    "hiera": "mask units, queries that are pooled",
    "maxvit_tf": "convolutions with squeeze-excite, windows and grids, streams between stages",
    "coatnext": "ConvNeXt blocks in front of attention over a whole map",
    "tiny_vit": "batch norms folded into convolutions, a convolution between attention and MLP",
    "efficientformer_v2": "talking heads on maps, attention that changes the size of its map",
}  # fmt: skip
"""Forms whose numbers are checked in every run, by the rule that each stands for. Other forms run no line of
calibration or repair that these, or tests of calib/, don't run: their structure is checked in every run
(test_timm_structure.py), their numbers nightly.
"""
PLANTED_ALONE = ("maxvit_tf", "tiny_vit", "efficientformer_v2")
"""The slowest of NUMERIC, of which every run takes planted redundancy alone: it goes through both ways of reducing."""


def numbered(forms: Iterable[str], *, nightly: Iterable[str] = ()) -> list[Any]:
    """Parametrise a test of numbers: forms of NUMERIC in every run, all others and these nightly."""
    every_run = NUMERIC.keys() - set(nightly)
    return [form if form in every_run else pytest.param(form, marks=pytest.mark.nightly) for form in forms]


_OF_MAPS = ("Hiera", "MaxxVit", "TinyVit", "EfficientFormer", "EfficientFormerV2")


@torch.no_grad()
def _enliven_maps_(model: nn.Module) -> None:
    """Weights by what enters them, and running statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.mul_((parameter.shape[-1] / parameter[0].numel()) ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.mul_(0.5 + torch.rand(buffer.shape, generator=generator))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def architecture(form: str, **changes: Any) -> Architecture:
    name, kwargs = FORMS[form]
    return Architecture(name=name, kwargs=kwargs | changes)


def library(form: str, **changes: Any) -> nn.Module:
    """timm's own with random weights that are large enough to matter."""
    name, kwargs = FORMS[form]
    arguments = {key: _tuples(value) for key, value in (kwargs | changes).items()}
    if form == "tiny_vit":
        del arguments["img_size"]
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **arguments).eval().requires_grad_(False)
    tiny.enliven(model, 0)
    if type(model).__name__ in _OF_MAPS:
        _enliven_maps_(model)
    return model


@cache
def checkpoint(form: str, **changes: Any) -> Checkpoint:
    """The same, whose sites are looked for."""
    return of_state(form, library(form, **changes).state_dict(), **changes)


def of_state(form: str, state: Mapping[str, Tensor], **changes: Any) -> Checkpoint:
    """A form with weights of its own."""
    named = architecture(form, **changes)
    model = dense_from_architecture(named)
    model.load_state_dict(state)
    return Checkpoint(model=model.requires_grad_(False), architecture=named, lineage={})


def pixels(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Smooth random images of the size that the model takes; of maps with something of their own at every pixel."""
    _, height, width = image_spec(model).shape
    images = torch.from_numpy(tiny.images(count, seed, max(height, width)))[:, :, :height, :width].contiguous()
    if type(model).__name__ not in _OF_MAPS:
        return images
    return 2.0 * images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(100 + seed))


def opened(model: nn.Module, count: int = 24, seed: int = 0) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", pixels(model, count, seed).numpy(), model)


def shown(form: str) -> Images:
    """As many as its statistics want: windows and last stages have few tokens."""
    return opened(checkpoint(form).model, 64 if form in BIASED else 48 if form in HIERARCHIES else 24)


@cache
def moments(form: str) -> Moments:
    return calibrate(checkpoint(form), shown(form), batch_size=8, statistics=Statistics(attention_system=True))


def method(preset: str = "best", **changes: Any) -> Method:
    asked: dict[str, Any] = dict.fromkeys(("mlp_sparsity", "attention_sparsity", "conv_sparsity"), 0.5)
    asked |= dict.fromkeys(("align_hidden", "align_head", "align_conv"), 8)
    return method_from_preset(preset, **asked | changes)


@cache
def reduced(form: str, preset: str = "best", **changes: Any) -> Reduction:
    return reduce(checkpoint(form).model, moments(form), method(preset, **changes))


@cache
def looped(form: str) -> Reduction:
    """Half of it in a closed loop."""
    return reduce_traced(checkpoint(form).model, shown(form), method(), loop=Loop())
