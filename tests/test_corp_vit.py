"""The view of timm's models: supported, refused with a reason, never edited."""

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from corp_deploy.families import timm_vit as vit
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_attention import HeadAttention
from corp_deploy.families.modules import replaced
from ground.errors import BadInput
from tests import tiny


def test_sites_of_a_plain_vit() -> None:
    found = vit.sites(tiny.checkpoint().model)
    assert [part.name for part in found.channels] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert [(part.name, part.heads, part.qk, part.v) for part in found.heads] == [
        ("blocks.0.attn", 3, 16, 16),
        ("blocks.1.attn", 3, 16, 16),
    ]
    assert found.refused == ()
    assert not any(part.keeps_qk for part in found.heads)


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        ("vit_tiny_patch16_224", {"scale_mlp_norm": True}, "mixes all hidden channels"),
        ("vit_tiny_patch16_224", {"scale_attn_norm": True, "qk_norm": True}, "mixes all heads"),
        ("vgg11", {}, "expected timm's VisionTransformer"),
        ("resnet18", {}, "or a model of corp_deploy.load, which traces others"),
        ("vit_small_patch14_reg4_dinov2", {"mlp_layer": "gated"}, "MLP is GatedMlp"),
        ("vit_little_patch16_reg1_gap_256", {}, "block is"),
    ],
)
def test_other_architectures_are_refused_with_a_reason(name: str, kwargs: dict[str, object], reason: str) -> None:
    if kwargs.get("mlp_layer") == "gated":
        from timm.layers import GatedMlp

        kwargs = {"mlp_layer": GatedMlp}
    if name == "vit_little_patch16_reg1_gap_256":
        from timm.models.vision_transformer import ParallelScalingBlock

        kwargs = {"block_fn": ParallelScalingBlock, "init_values": 1e-5}
    small = {} if name in ("resnet18", "vgg11") else {"depth": 1, "embed_dim": 48, "num_heads": 3}
    model = tiny.timm_model(name, **small, **kwargs)
    try:
        said = "; ".join(refusal.reason for refusal in sites_of(model).refused)
    except BadInput as error:
        said = str(error)
    assert reason in said


def test_qk_norm_keeps_q_and_k_but_the_rest_is_offered() -> None:
    model = tiny.timm_model("vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=3, qk_norm=True)
    found = vit.sites(model)
    assert found.heads[0].keeps_qk
    assert "q_norm / k_norm" in found.heads[0].reason
    assert [part.name for part in found.channels] == ["blocks.0.mlp"]


def test_replacing_leaves_the_given_model_alone() -> None:
    model = tiny.checkpoint().model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = replaced(model, {"blocks.0.mlp.fc1": nn.Linear(48, 8), "blocks.0.mlp.fc2": nn.Linear(8, 48)})
    assert new.get_submodule("blocks.0.mlp.fc1").out_features == 8
    assert isinstance(model.get_submodule("blocks.0.mlp"), Mlp)
    assert model.get_submodule("blocks.0.mlp.fc1").out_features == 192
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert new.get_submodule("blocks.1.mlp.fc1").weight is not model.get_submodule("blocks.1.mlp.fc1").weight


def test_exportable_form_computes_the_same() -> None:
    model = tiny.checkpoint().model
    images = torch.from_numpy(tiny.images(3))
    plain = family_of(model).exportable(model)
    attentions = [module for module in plain.modules() if isinstance(module, HeadAttention)]
    assert [module.fused for module in attentions] == [False, False]
    with torch.inference_mode():
        torch.testing.assert_close(plain(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("qk", "v"), [(5, 8), (8, 8), (8, 5)])
def test_padding_changes_nothing(qk: int, v: int) -> None:
    torch.manual_seed(0)
    common = {"dim": 24, "heads": 3, "qk": qk, "v": v, "scale": 0.3, "qkv_bias": True, "proj_bias": True}
    ragged = HeadAttention(geometry="ragged", **common)  # type: ignore[arg-type]
    padded = HeadAttention(geometry="padded", fused=False, **common)  # type: ignore[arg-type]
    padded.load_state_dict(ragged.state_dict())
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(padded(x), ragged(x), rtol=1e-5, atol=1e-5)


def test_the_scale_is_the_one_given_not_one_of_the_width() -> None:
    torch.manual_seed(0)
    attention = HeadAttention(
        dim=8, heads=1, qk=4, v=8, scale=8**-0.5, geometry="ragged", qkv_bias=True, proj_bias=True
    )
    x = torch.randn(1, 5, 8)
    q, k, v = attention.qkv(x).split([4, 4, 8], dim=-1)
    expected = attention.proj(torch.softmax(q @ k.mT / 8**0.5, dim=-1) @ v)
    torch.testing.assert_close(attention(x), expected)


def test_a_square_head_with_unequal_widths_is_refused() -> None:
    with pytest.raises(ValueError, match="qk = v"):
        HeadAttention(dim=8, heads=1, qk=4, v=8, scale=1.0, geometry="square", qkv_bias=True, proj_bias=True)
