"""MACs and parameters against formulas written out here."""

import pytest
import timm

from corp_deploy import vit
from corp_deploy.attention import HeadAttention
from corp_deploy.cost import attention_macs, macs


def hand_macs(
    dim: int, depth: int, *, tokens: int = 197, patches: int = 196, patch: int = 16, classes: int = 1000
) -> int:
    """Patch embedding, then per block q, k, v, Q K', A V, proj, fc1, fc2; then the head on one token."""
    per_block = 3 * tokens * dim * dim + 2 * tokens * tokens * dim + tokens * dim * dim + 2 * tokens * dim * (4 * dim)
    return patches * (3 * patch * patch) * dim + depth * per_block + dim * classes


def hand_parameters(dim: int, depth: int, *, tokens: int = 197, patch: int = 16, classes: int = 1000) -> int:
    norms = 2 * 2 * dim
    per_block = (
        norms + (3 * dim * dim + 3 * dim) + (dim * dim + dim) + (4 * dim * dim + 4 * dim) + (4 * dim * dim + dim)
    )
    embedding = 3 * patch * patch * dim + dim + dim + tokens * dim
    return embedding + depth * per_block + 2 * dim + dim * classes + classes


@pytest.mark.parametrize(
    ("name", "dim", "gmacs"),
    [
        ("deit_tiny_patch16_224", 192, 1.25),
        ("deit_small_patch16_224", 384, 4.60),
        ("deit_base_patch16_224", 768, 17.56),
    ],
)
def test_deit_equals_the_hand_written_formula(name: str, dim: int, gmacs: float) -> None:
    model = timm.create_model(name, pretrained=False)
    assert macs(vit.shape(model)) == hand_macs(dim, 12)
    assert round(macs(vit.shape(model)) / 1e9, 2) == gmacs
    assert sum(p.numel() for p in model.parameters()) == hand_parameters(dim, 12)


def test_padded_heads_count_what_the_engine_multiplies() -> None:
    narrow = attention_macs(tokens=10, dim=8, heads=2, qk=2, v=4, padded=False)
    padded = attention_macs(tokens=10, dim=8, heads=2, qk=2, v=4, padded=True)
    assert narrow == 10 * 8 * 2 * (2 + 2 + 4 + 4) + 2 * 10 * 10 * (2 + 4)
    assert padded - narrow == 2 * 10 * 10 * 2


def test_reduced_model_counts_its_own_widths() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )
    dense = vit.shape(model)
    part = vit.parts(model).attentions[1]
    reduced = vit.replaced(model, {part.name: vit.empty_attention(part, qk=4, v=8, geometry="ragged")})
    assert isinstance(reduced.get_submodule(part.name), HeadAttention)
    saved = 2 * 17 * 24 * 3 * 4 + 3 * 17 * 17 * 4
    assert macs(dense) - macs(vit.shape(reduced)) == saved
