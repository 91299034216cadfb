"""Every architecture that timm builds as its VisionTransformer: which have sites, of which something stays, and why."""

import re
from collections.abc import Iterator

import pytest
import timm
import torch

from corp_deploy.families import timm_vit
from corp_deploy.families.family import family_of, sites_of

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "vitamin")
SIDE_BY_SIDE = ("vit_base_patch16_18x2_224", "vit_small_patch16_18x2_224")
# Whose attentions or MLPs stay, with words of the reason.
PARTLY = {
    r"beit3_.*": (2, "LayerNorm between the linear layers mixes all hidden channels"),
    r"vit_d(wee|little)_patch16_reg1_gap_256": (2, "difference of two softmaxes"),
}
NOT_AT_ALL = {
    r"vit_.*_xp_224|vit_pwee_.*": "block is ParallelScalingBlock: one layer gives",
    r"vit_dpwee_.*": "block is DiffParallelScalingBlock: one layer gives",
}
GATED = r"aimv2_.*|vitamin_.*|vit_giant_patch14_(dinov2|reg4_dinov2|reg1_tipsv2)"


def names() -> Iterator[str]:
    for module in MODULES:
        yield from timm.list_models(module=module)


def on_meta(name: str) -> torch.nn.Module:
    """Two blocks, without memory."""
    with torch.device("meta"):
        model: torch.nn.Module = timm.create_model(name, depth=2)
    return model


@pytest.mark.slow("models")
@pytest.mark.parametrize("module", MODULES)
def test_every_architecture_is_reduced_or_refused_with_a_reason(module: str) -> None:
    for name in timm.list_models(module=module):
        model = on_meta(name)
        if not timm_vit.accepts(model):
            continue
        assert family_of(model).NAME == timm_vit.NAME
        offered = sites_of(model)
        part = next((expected for pattern, expected in PARTLY.items() if re.fullmatch(pattern, name)), None)
        whole = next((reason for pattern, reason in NOT_AT_ALL.items() if re.fullmatch(pattern, name)), None)
        if part is not None:
            assert len(offered.every) == part[0], name
            assert all(part[1] in refusal.reason for refusal in offered.refused), name
            assert len(offered.refused) == 2, name
        elif whole is not None:
            assert offered.every == (), name
            assert [refusal.name for refusal in offered.refused] == ["blocks.0", "blocks.1"], name
            assert all(whole in refusal.reason for refusal in offered.refused), name
        else:
            assert offered.refused == (), name
            assert len(offered.every) == (8 if name in SIDE_BY_SIDE else 4), name
        gated = [site.gated for site in offered.channels]
        assert gated == [bool(re.fullmatch(GATED, name))] * len(gated), name
        assert not any(site.keeps_qk for site in offered.heads), name
        assert all(site.keeps_v == name.startswith("beit3") for site in offered.heads), name


def test_the_table_names_what_there_is() -> None:
    known = set(names())
    assert known >= set(SIDE_BY_SIDE)
    for pattern in (*PARTLY, *NOT_AT_ALL, GATED):
        assert any(re.fullmatch(pattern, name) for name in known), pattern
