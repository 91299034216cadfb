"""timm's names for the chain, by family, with the arguments that make them small."""

from collections.abc import Mapping
from typing import Any

from benchmarks.coverage.group import HEAD_DIM, Group

_STAGES: Mapping[str, Any] = {"num_classes": 10, "img_size": 64}
_WINDOWS: Mapping[str, Any] = {**_STAGES, "depths": (2, 2), "window_size": 4}


def _vit(family: str, *names: str, patch: int = 16, **more: Any) -> Group:
    """Return ViTs with sixteen patches, of the size in the name, and two blocks."""
    return Group(family=family, names=names, kwargs={"depth": 2, "num_classes": 10, "img_size": 4 * patch, **more})


def _scaled_vit(family: str, *names: str, **more: Any) -> Group:
    """Return ViTs whose layer scales start at 0.5."""
    return _vit(family, *names, init_values=0.5, **more)


def _staged(family: str, *names: str, **kwargs: Any) -> Group:
    """Return models whose arguments give the widths of their heads."""
    return Group(family=family, names=names, kwargs={**_STAGES, **kwargs}, head_dim=None)


TIMM: tuple[Group, ...] = (
    _vit(
        "ViT",
        "vit_tiny_patch16_224",
        "vit_small_patch16_224",
        "vit_base_patch16_224",
        "vit_large_patch16_224",
        "vit_base_patch16_gap_224",
        "vit_base_patch16_224_miil",
        "vit_medium_patch16_reg4_gap_256",
        "vit_wee_patch16_reg1_gap_256",
    ),
    _vit("ViT", "vit_base_patch32_224", patch=32),
    _scaled_vit(
        "ViT, residual post-norm or parallel blocks",
        "vit_base_patch16_rpn_224",
        "vit_small_patch16_18x2_224",
        "vit_base_patch16_18x2_224",
    ),
    _vit("FlexiViT", "flexivit_small", "flexivit_base"),
    _vit("DeiT", "deit_tiny_patch16_224", "deit_base_patch16_224", "deit_small_distilled_patch16_224"),
    _scaled_vit("DeiT III", "deit3_small_patch16_224", "deit3_base_patch16_224"),
    _scaled_vit(
        "DINOv2", "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_small_patch14_reg4_dinov2", patch=14
    ),
    _scaled_vit(
        "DINOv2, gated MLP", "vit_giant_patch14_dinov2", "vit_giant_patch14_reg4_dinov2", patch=14, mlp_ratio=4.0
    ),
    _vit("CLIP", "vit_base_patch16_clip_224", "vit_base_patch16_clip_quickgelu_224"),
    _vit("SigLIP", "vit_base_patch16_siglip_224", "vit_base_patch16_siglip_gap_224"),
    _vit("SigLIP", "vit_so400m_patch14_siglip_224", patch=14),
    _vit("AIMv2", "aimv2_large_patch14_224", patch=14),
    _vit("BEiT-3", "beit3_base_patch16_224"),
    _staged("ViTamin", "vitamin_small_224", depth=2),
    _vit("EVA-02", "eva02_tiny_patch14_224", "eva02_small_patch14_224", patch=14),
    _vit("EVA-02", "eva02_base_patch16_clip_224"),
    _vit("EVA", "eva_giant_patch14_224", patch=14),
    _scaled_vit(
        "DINOv3",
        "vit_small_patch16_dinov3",
        "vit_base_patch16_dinov3",
        "vit_small_plus_patch16_dinov3",
        "vit_small_patch16_dinov3_qkvb",
    ),
    _vit(
        "Rotary ViT",
        "vit_small_patch16_rope_224",
        "vit_small_patch16_rope_ape_224",
        "vit_small_patch16_rope_mixed_224",
        "vit_base_patch16_rope_reg1_gap_256",
        "vit_medium_patch16_rope_reg1_gap_256",
    ),
    _vit("Perception Encoder", "vit_pe_core_base_patch16_224", "vit_pe_spatial_base_patch16_512"),
    _vit("LingBot", "vit_small_patch16_lingbot"),
    _scaled_vit("BEiT", "beit_base_patch16_224", "beit_large_patch16_224", "beitv2_base_patch16_224"),
    _scaled_vit(
        "ViT of relative positions",
        "vit_relpos_small_patch16_224",
        "vit_relpos_base_patch16_cls_224",
        "vit_relpos_base_patch16_clsgap_224",
        "vit_relpos_small_patch16_rpn_224",
        "vit_srelpos_small_patch16_224",
    ),
    Group(
        family="Swin",
        names=(
            "swin_tiny_patch4_window7_224",
            "swin_small_patch4_window7_224",
            "swin_base_patch4_window7_224",
            "swin_s3_tiny_224",
        ),
        kwargs=_WINDOWS,
    ),
    _scaled_vit("CaiT", "cait_xxs24_224", "cait_s24_224"),
    Group(family="Swin V2", names=("swinv2_tiny_window8_256", "swinv2_base_window8_256"), kwargs=_WINDOWS),
    _staged("ConvNeXt", "convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 128), ls_init_value=0.5),
    _staged("ConvNeXt", "convnext_femto", depths=(1, 1, 2, 1), dims=(48, 96, 192, 384), ls_init_value=0.5),
    _staged(
        "Hiera",
        "hiera_tiny_224",
        "hiera_small_abswin_256",
        embed_dim=16,
        num_heads=1,
        stages=(1, 2, 1, 1),
        init_values=0.5,
    ),
    _staged(
        "MaxViT",
        "maxvit_tiny_tf_224",
        "maxvit_rmlp_pico_rw_256",
        "maxxvit_rmlp_nano_rw_256",
        embed_dim=(32, 64),
        depths=(1, 1),
        block_type=("M", "M"),
        stem_width=(16, 16),
        conv_init_values=0.5,
        transformer_init_values=0.5,
        transformer_window_size=(4, 4),
        transformer_grid_size=(4, 4),
        transformer_dim_head=HEAD_DIM,
    ),
    _staged(
        "CoAtNet",
        "coatnet_0_rw_224",
        "coatnext_nano_rw_224",
        embed_dim=(16, 32, 64),
        depths=(1, 2, 1),
        block_type=("C", "T", "T"),
        stem_width=(16, 16),
        conv_init_values=0.5,
        transformer_init_values=0.5,
        transformer_dim_head=HEAD_DIM,
    ),
    Group(
        family="EfficientFormer",
        names=("efficientformer_l1",),
        kwargs={
            "num_classes": 10,
            "embed_dims": (16, 24, 32, 160),
            "depths": (1, 1, 1, 2),
            "num_vit": 1,
            "mlp_ratios": 2,
            "layer_scale_init_value": 0.5,
        },
        head_dim=None,
    ),
    _staged(
        "EfficientFormer V2",
        "efficientformerv2_s0",
        embed_dims=(16, 24, 32, 48),
        depths=(1, 1, 2, 2),
        num_vit=1,
        mlp_ratios=3,
        layer_scale_init_value=0.5,
    ),
    _staged("ConvNeXt V2", "convnextv2_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 128)),
    _staged("ConvNeXt V2", "convnextv2_tiny", depths=(1, 1, 2, 1), dims=(24, 48, 96, 192)),
    _staged("ResNet", "resnet18", "resnet34", layers=[1, 1, 2, 1], channels=[64, 64, 96, 128]),
    Group(family="MLP-Mixer", names=("mixer_s32_224",), kwargs={"num_classes": 10}, head_dim=None),
    Group(family="gMixer", names=("gmixer_12_224",), kwargs={"num_classes": 10}, head_dim=None),
)
