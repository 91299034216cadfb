"""timm's classes without a family: the name of a model, arguments that make it small, and the side of its images."""

from collections.abc import Mapping
from typing import Any

from timm.models import metaformer, mvitv2, nfnet, twins
from torch import nn

_D4: Mapping[str, Any] = {"depths": (1, 1, 1, 1)}
_D3: Mapping[str, Any] = {"depths": (1, 1, 1)}


def _dims(*dims: int, name: str = "dims", depths: str = "depths") -> dict[str, Any]:
    """Return the arguments for one block in each stage, of these widths."""
    return {depths: (1,) * len(dims), name: dims}


CLASSES: Mapping[str, tuple[str, Mapping[str, Any], int]] = {
    "ByobNet": ("mobilevit_xxs", {}, 64),
    "CPUBone": ("cpubone_nano", {}, 64),
    "CSATv2": ("csatv2", {"dims": (32, 48, 64, 96), "depths": (1, 1, 2, 2), "transformer_depths": (0, 0, 1, 1)}, 128),
    "CoaT": ("coat_lite_tiny", {"serial_depths": (1, 1, 1, 1), "embed_dims": (32, 64, 96, 128)}, 64),
    "ConVit": ("convit_tiny", {"depth": 3, "embed_dim": 64, "local_up_to_layer": 2}, 64),
    "ConvMixer": ("", {"dim": 64, "depth": 3}, 56),
    "CrossVit": (
        "",
        {
            "patch_size": (12, 16),
            "embed_dim": (64, 128),
            "depth": ((1, 2, 0), (1, 2, 0)),
            "num_heads": (4, 4),
            "mlp_ratio": (3.0, 3.0, 1.0),
        },
        96,
    ),
    "CspNet": ("cs3darknet_focus_s", {}, 64),
    "CspNext": ("cspnext_tiny", {"depths": (1, 1, 1, 1), "channels": (32, 48, 64, 96)}, 64),
    "DLA": ("dla46_c", {}, 64),
    "DPN": ("dpn48b", {"k_sec": (1, 1, 1, 1)}, 64),
    "DaVit": ("davit_tiny", {**_dims(32, 64, 96, 128, name="embed_dims"), "num_heads": (2, 4, 6, 8)}, 112),
    "DeepseekVitClassifier": ("deepseek_vit_412m", {"depth": 2, "embed_dim": 64, "num_heads": 4}, 84),
    "DenseNet": ("densenet121", {"growth_rate": 16, "block_config": (2, 2, 2)}, 64),
    "EdgeNeXt": ("edgenext_xx_small", {**_dims(24, 48, 64, 96)}, 64),
    "EfficientViM": ("efficientvim_m1", {**_dims(32, 64, 96, name="embed_dim")}, 128),
    "EfficientVit": ("efficientvit_b0", {}, 64),
    "EfficientVitMsra": ("efficientvit_m0", {}, 128),
    "FastVit": ("fastvit_t8", {**_dims(32, 64, 128, 256, name="embed_dims", depths="layers")}, 64),
    "FasterNet": ("fasternet_t0", {**_D4}, 64),
    "FocalNet": ("", {**_D4, "embed_dim": 32}, 64),
    "Gemma4VitClassifier": (
        "gemma4_vit_167m",
        {"depth": 2, "embed_dim": 64, "num_heads": 4, "head_dim": 16, "intermediate_size": 192},
        96,
    ),
    "GhostNet": ("ghostnet_050", {}, 64),
    "GlobalContextVit": ("", {**_D4, "embed_dim": 32}, 224),
    "HieraDet": ("sam2_hiera_tiny", {"embed_dim": 32, "stages": (1, 1, 2, 1), "global_att_blocks": (3,)}, 224),
    "HighPerfGpuNet": ("hgnetv2_b0", {}, 64),
    "HighResolutionNet": ("hrnet_w18_small", {}, 64),
    "IFormer": ("iformer_t", {"dims": (32, 48, 64, 96)}, 64),
    "InceptionResnetV2": ("inception_resnet_v2", {}, 96),
    "InceptionV3": ("inception_v3", {}, 96),
    "InceptionV4": ("inception_v4", {}, 96),
    "LCNetV2": ("lcnetv2_small", {**_D4}, 64),
    "LevitDistilled": (
        "",
        {"embed_dim": (32, 64, 96), "num_heads": (2, 4, 6), "depth": (1, 1, 1), "key_dim": 16, "img_size": 64},
        64,
    ),
    "LowFormer": ("lowformer_b0", {}, 64),
    "MambaOut": ("mambaout_femto", {**_dims(32, 48, 64, 96)}, 64),
    "MetaFormer": (
        "",
        {
            **_dims(32, 64, 96, 128),
            "token_mixers": [metaformer.SepConv] * 2 + [metaformer.Attention] * 2,
            "norm_layers": [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
            "res_scale_init_values": (None, None, 1.0, 1.0),
        },
        64,
    ),
    "MetaNeXt": ("inception_next_atto", {**_dims(40, 80, 96, 128)}, 64),
    "MobileNetV5": ("mobilenetv5_300m", {}, 128),
    "MultiScaleVit": ("", {"cfg": mvitv2.MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=32)}, 64),
    "NASNetALarge": ("", {"stem_size": 16, "num_features": 384}, 96),
    "NaFlexVit": ("naflexvit_base_patch16_gap", {"depth": 2, "embed_dim": 64, "num_heads": 4}, 64),
    "Nest": ("", {"embed_dims": (32, 64, 96), "num_heads": (2, 4, 6), "depths": (1, 1, 1)}, 64),
    "NextViT": ("nextvit_small", {"depths": (2, 2, 5, 2), "stem_chs": (16, 16, 16)}, 64),
    "NormFreeNet": (
        "",
        {
            "cfg": nfnet.NfCfg(
                depths=(1, 1, 1, 1),
                channels=(64, 96, 128, 128),
                bottle_ratio=0.5,
                group_size=16,
                attn_layer="se",
                attn_kwargs={},
            )
        },
        64,
    ),
    "PNASNet5Large": ("pnasnet5large", {}, 96),
    "PoolingVisionTransformer": ("", {"patch_size": 8, "stride": 4, "base_dims": (16, 16, 16), "depth": (1, 1, 1)}, 64),
    "PyramidVisionTransformerV2": (
        "pvt_v2_b0",
        {**_dims(16, 32, 48, 64, name="embed_dims"), "num_heads": (1, 2, 3, 4), "mlp_ratios": (4, 4, 4, 4)},
        64,
    ),
    "Qwen3VitClassifier": ("qwen3_vit_88m", {"depth": 2, "embed_dim": 64, "num_heads": 4}, 64),
    "RDNet": (
        "rdnet_tiny",
        {
            "num_init_features": 32,
            "growth_rates": (16, 16, 16),
            "num_blocks_list": (2, 2, 2),
            "is_downsample_block": (None, True, True),
            "block_type": ("Block", "Block", "BlockESE"),
        },
        64,
    ),
    "RepGhostNet": ("repghostnet_050", {}, 64),
    "RepVit": ("", {"embed_dim": (32, 48, 64, 96), "depth": (1, 1, 1, 1)}, 64),
    "ResNetV2": ("resnetv2_50", {"layers": (1, 1, 1, 1), "channels": (64, 96, 128, 128)}, 64),
    "RexNet": ("rexnet_100", {"depth_mult": 0.5}, 64),
    "SENet": ("legacy_seresnet18", {}, 64),
    "SHViT": ("shvit_s1", {}, 128),
    "SelecSls": ("selecsls42", {}, 64),
    "Sequencer2d": (
        "sequencer2d_s",
        {"layers": (1, 1, 1, 1), "embed_dims": (32, 64, 64, 64), "hidden_sizes": (8, 16, 16, 16)},
        56,
    ),
    "StarNet": ("starnet_s050", {}, 64),
    "SwiftFormer": ("swiftformer_xs", {**_dims(24, 32, 48, 64, name="embed_dims", depths="layers")}, 64),
    "SwinTransformerV2Cr": ("swinv2_cr_tiny_224", {"embed_dim": 32, "depths": (1, 1, 2), "num_heads": (2, 4, 8)}, 64),
    "TNT": (
        "tnt_s_patch16_224",
        {"embed_dim": 64, "inner_dim": 16, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 4},
        64,
    ),
    "TResNet": ("tresnet_m", {"layers": [1, 1, 1, 1], "width_factor": 0.5}, 64),
    "Twins": (
        "",
        {
            "embed_dims": (32, 64, 96, 128),
            "num_heads": (1, 2, 3, 4),
            "depths": (1, 1, 2, 1),
            "wss": (4, 4, 2, 2),
            "block_cls": twins.Block,
        },
        64,
    ),
    "VGG": ("", {"cfg": [32, "M", 48, "M", 64, 64, "M", 96, "M", 96, "M"], "norm_layer": nn.BatchNorm2d}, 64),
    "VOLO": (
        "",
        {
            "layers": (1, 1, 2, 1),
            "embed_dims": (32, 64, 64, 64),
            "num_heads": (2, 4, 4, 4),
            "downsamples": (True, False, False, False),
            "outlook_attention": (True, False, False, False),
        },
        64,
    ),
    "Visformer": (
        "",
        {
            "init_channels": 16,
            "embed_dim": 96,
            "depth": (1, 1, 1),
            "num_heads": 3,
            "attn_stage": "011",
            "spatial_conv": "100",
            "norm_layer": nn.BatchNorm2d,
        },
        64,
    ),
    "VisionTransformerSAM": (
        "samvit_base_patch16",
        {"depth": 2, "embed_dim": 64, "num_heads": 4, "global_attn_indexes": (1,), "neck_chans": 32, "window_size": 2},
        64,
    ),
    "VovNet": ("ese_vovnet19b_slim", {}, 64),
    "Xception": ("legacy_xception", {}, 96),
    "XceptionAligned": ("xception41", {}, 64),
    "Xcit": ("xcit_nano_12_p8_224", {"depth": 2, "embed_dim": 64}, 64),
}
