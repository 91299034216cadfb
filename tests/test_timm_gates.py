"""Gated MLPs (SwiGLU, GeGLU): channels are products of two rows, kept, ranked, counted and given up in pairs."""

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.model import reduce
from tests.test_traced_chain import kept_of
from tests.timm_models import checkpoint, method, moments, opened

SITE = "blocks.0.mlp"
GATES = {"packed gate": ("fc1",), "gate apart": ("fc1_g", "fc1_x")}
"""By the layers that write a gate and what it gates."""


def rows(model: nn.Module, form: str, kind: str = "weight") -> Tensor | None:
    """Of the gate and of the other [2, F, ...], None of biases that there aren't."""
    state, names = model.state_dict(), [f"{SITE}.{layer}.{kind}" for layer in GATES[form]]
    return torch.cat([state[name] for name in names]).unflatten(0, (2, -1)) if names[0] in state else None


@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("preset", ["best", "vbp"])
def test_gated_rows_are_kept_in_pairs(form: str, preset: str) -> None:
    dense = checkpoint(form).model
    narrower = reduce(dense, moments(form), method(preset, attention_sparsity=None), widths={SITE: 40}).model
    kept_K = torch.from_numpy(kept_of(narrower)[SITE])
    assert len(kept_K) == 40
    for kind in ("weight", "bias"):
        of_dense, of_new = rows(dense, form, kind), rows(narrower, form, kind)
        assert (of_dense is None) == (of_new is None)
        if of_dense is not None and of_new is not None:
            assert torch.equal(of_new, of_dense[:, kept_K])


@pytest.mark.parametrize("form", GATES)
@pytest.mark.parametrize("ranking", ["producer-l1", "producer-l2"])
def test_both_layers_rank_a_gated_channel(form: str, ranking: str) -> None:
    dense, asked = checkpoint(form).model, method("corp", mlp_selection=ranking, attention_sparsity=None)
    by_channel = rows(dense, form)
    assert by_channel is not None
    scores = by_channel.double().abs() if ranking == "producer-l1" else by_channel.double().square()
    best = sorted(range(by_channel.shape[1]), key=scores.sum((0, 2)).tolist().__getitem__)[-48:]
    assert kept_of(reduce(dense, moments(form), asked).model)[SITE].tolist() == sorted(best)


@pytest.mark.parametrize("form", GATES)
def test_folding_skips_gated_layers_with_a_reason(form: str) -> None:
    dense, asked = checkpoint(form).model, method("fold", attention_sparsity=None)
    done = reduce(dense, moments(form), asked, images=opened(dense))
    assert (done.sites, set(done.coverage.refused)) == ((), {"blocks.0.mlp", "blocks.1.mlp"})
    assert all("product of two means" in reason for reason in done.coverage.refused.values())


@pytest.mark.parametrize("form", GATES)
def test_gated_mlp_costs_three_layers(form: str) -> None:
    dense = checkpoint(form).model
    site, costs = sites_of(dense).by_name[SITE], site_costs(dense, "macs")
    tokens = 17 if form == "packed gate" else 16
    assert costs.now[SITE] == 3 * tokens * 48 * 96 == 2 * costs.of(site, 48)
    narrower = reduce(dense, moments(form), method("none", attention_sparsity=None), widths={SITE: 48}).model
    assert macs(dense) - macs(narrower) == costs.of(site, 48)
