"""timm's names that are taken through the chain, family by family, with what makes each small."""

from collections.abc import Mapping
from typing import Any

from benchmarks.coverage.group import HEAD_DIM, Group


def _vit(patch: int, **more: Any) -> dict[str, Any]:
    """Sixteen patches, of the size in the name, and two blocks."""
    return {"depth": 2, "num_classes": 10, "img_size": 4 * patch, **more}


_STAGES: Mapping[str, Any] = {"num_classes": 10, "img_size": 64}
TIMM: tuple[Group, ...] = (
    Group(
        family="ViT",
        names=(
            "vit_tiny_patch16_224",
            "vit_small_patch16_224",
            "vit_base_patch16_224",
            "vit_large_patch16_224",
            "vit_base_patch16_gap_224",
            "vit_base_patch16_224_miil",
            "vit_medium_patch16_reg4_gap_256",
            "vit_wee_patch16_reg1_gap_256",
        ),
        kwargs=_vit(16),
    ),
    Group(family="ViT", names=("vit_base_patch32_224",), kwargs=_vit(32)),
    Group(
        family="ViT, residual post-norm or parallel blocks",
        names=("vit_base_patch16_rpn_224", "vit_small_patch16_18x2_224", "vit_base_patch16_18x2_224"),
        kwargs=_vit(16, init_values=0.5),
    ),
    Group(family="FlexiViT", names=("flexivit_small", "flexivit_base"), kwargs=_vit(16)),
    Group(
        family="DeiT",
        names=("deit_tiny_patch16_224", "deit_base_patch16_224", "deit_small_distilled_patch16_224"),
        kwargs=_vit(16),
    ),
    Group(
        family="DeiT III",
        names=("deit3_small_patch16_224", "deit3_base_patch16_224"),
        kwargs=_vit(16, init_values=0.5),
    ),
    Group(
        family="DINOv2",
        names=("vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),
        kwargs=_vit(14, init_values=0.5),
    ),
    Group(
        family="DINOv2, gated MLP",
        names=("vit_giant_patch14_dinov2", "vit_giant_patch14_reg4_dinov2"),
        kwargs=_vit(14, init_values=0.5, mlp_ratio=4.0),
    ),
    Group(
        family="CLIP",
        names=("vit_base_patch16_clip_224", "vit_base_patch16_clip_quickgelu_224"),
        kwargs=_vit(16),
    ),
    Group(
        family="SigLIP",
        names=("vit_base_patch16_siglip_224", "vit_base_patch16_siglip_gap_224"),
        kwargs=_vit(16),
    ),
    Group(family="SigLIP", names=("vit_so400m_patch14_siglip_224",), kwargs=_vit(14)),
    Group(family="AIMv2", names=("aimv2_large_patch14_224",), kwargs=_vit(14)),
    Group(family="BEiT-3", names=("beit3_base_patch16_224",), kwargs=_vit(16)),
    Group(
        family="ViTamin",
        names=("vitamin_small_224",),
        kwargs={"depth": 2, "num_classes": 10, "img_size": 64},
        head_dim=None,
    ),
    Group(
        family="EVA-02",
        names=(
            "eva02_tiny_patch14_224",
            "eva02_small_patch14_224",
        ),
        kwargs=_vit(14),
    ),
    Group(family="EVA-02", names=("eva02_base_patch16_clip_224",), kwargs=_vit(16)),
    Group(family="EVA", names=("eva_giant_patch14_224",), kwargs=_vit(14)),
    Group(
        family="DINOv3",
        names=(
            "vit_small_patch16_dinov3",
            "vit_base_patch16_dinov3",
            "vit_small_plus_patch16_dinov3",
            "vit_small_patch16_dinov3_qkvb",
        ),
        kwargs=_vit(16, init_values=0.5),
    ),
    Group(
        family="Rotary ViT",
        names=(
            "vit_small_patch16_rope_224",
            "vit_small_patch16_rope_ape_224",
            "vit_small_patch16_rope_mixed_224",
            "vit_base_patch16_rope_reg1_gap_256",
            "vit_medium_patch16_rope_reg1_gap_256",
        ),
        kwargs=_vit(16),
    ),
    Group(
        family="Perception Encoder",
        names=("vit_pe_core_base_patch16_224", "vit_pe_spatial_base_patch16_512"),
        kwargs=_vit(16),
    ),
    Group(family="LingBot", names=("vit_small_patch16_lingbot",), kwargs=_vit(16)),
    Group(
        family="BEiT",
        names=("beit_base_patch16_224", "beit_large_patch16_224", "beitv2_base_patch16_224"),
        kwargs=_vit(16, init_values=0.5),
    ),
    Group(
        family="ViT of relative positions",
        names=(
            "vit_relpos_small_patch16_224",
            "vit_relpos_base_patch16_cls_224",
            "vit_relpos_base_patch16_clsgap_224",
            "vit_relpos_small_patch16_rpn_224",
            "vit_srelpos_small_patch16_224",
        ),
        kwargs=_vit(16, init_values=0.5),
    ),
    Group(
        family="Swin",
        names=(
            "swin_tiny_patch4_window7_224",
            "swin_small_patch4_window7_224",
            "swin_base_patch4_window7_224",
            "swin_s3_tiny_224",
        ),
        kwargs={
            "depths": (2, 2),
            "window_size": 4,
            "num_classes": 10,
            "img_size": 64,
        },
    ),
    Group(
        family="CaiT",
        names=("cait_xxs24_224", "cait_s24_224"),
        kwargs=_vit(16, init_values=0.5),
    ),
    Group(
        family="Swin V2",
        names=("swinv2_tiny_window8_256", "swinv2_base_window8_256"),
        kwargs={
            "depths": (2, 2),
            "window_size": 4,
            "num_classes": 10,
            "img_size": 64,
        },
    ),
    *(
        Group(
            family="ConvNeXt",
            names=(name,),
            kwargs={
                "depths": (1, 1, 2, 1),
                "dims": dims,
                "num_classes": 10,
                "img_size": 64,
                "ls_init_value": 0.5,
            },
            head_dim=None,
        )
        for name, dims in (
            ("convnext_atto", (16, 32, 64, 128)),
            ("convnext_femto", (48, 96, 192, 384)),
        )
    ),
    Group(
        family="Hiera",
        names=("hiera_tiny_224", "hiera_small_abswin_256"),
        kwargs={**_STAGES, "embed_dim": 16, "num_heads": 1, "stages": (1, 2, 1, 1), "init_values": 0.5},
        head_dim=None,
    ),
    Group(
        family="MaxViT",
        names=("maxvit_tiny_tf_224", "maxvit_rmlp_pico_rw_256", "maxxvit_rmlp_nano_rw_256"),
        kwargs={
            **_STAGES,
            "embed_dim": (32, 64),
            "depths": (1, 1),
            "block_type": ("M", "M"),
            "stem_width": (16, 16),
            "conv_init_values": 0.5,
            "transformer_init_values": 0.5,
            "transformer_window_size": (4, 4),
            "transformer_grid_size": (4, 4),
            "transformer_dim_head": HEAD_DIM,
        },
        head_dim=None,
    ),
    Group(
        family="CoAtNet",
        names=("coatnet_0_rw_224", "coatnext_nano_rw_224"),
        kwargs={
            **_STAGES,
            "embed_dim": (16, 32, 64),
            "depths": (1, 2, 1),
            "block_type": ("C", "T", "T"),
            "stem_width": (16, 16),
            "conv_init_values": 0.5,
            "transformer_init_values": 0.5,
            "transformer_dim_head": HEAD_DIM,
        },
        head_dim=None,
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
    Group(
        family="EfficientFormer V2",
        names=("efficientformerv2_s0",),
        kwargs={
            **_STAGES,
            "embed_dims": (16, 24, 32, 48),
            "depths": (1, 1, 2, 2),
            "num_vit": 1,
            "mlp_ratios": 3,
            "layer_scale_init_value": 0.5,
        },
        head_dim=None,
    ),
    *(
        Group(
            family="ConvNeXt V2",
            names=(name,),
            kwargs={"depths": (1, 1, 2, 1), "dims": dims, "num_classes": 10, "img_size": 64},
            head_dim=None,
        )
        for name, dims in (("convnextv2_atto", (16, 32, 64, 128)), ("convnextv2_tiny", (24, 48, 96, 192)))
    ),
    Group(
        family="ResNet",
        names=("resnet18", "resnet34"),
        kwargs={**_STAGES, "layers": [1, 1, 2, 1], "channels": [64, 64, 96, 128]},
        head_dim=None,
    ),
    Group(family="MLP-Mixer", names=("mixer_s32_224",), kwargs={"num_classes": 10}, head_dim=None),
    Group(family="gMixer", names=("gmixer_12_224",), kwargs={"num_classes": 10}, head_dim=None),
)
