"""Fewer heads of every form of attention: dense models with those projections' columns at zero."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.moments import HeadMoments, Moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.whole_heads import kept_heads
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from tests import tiny, vit_forms
from tests.small_models import opened, outputs

DROPPED = method_from_preset("none", heads_sparsity=0.5)


def without(model: nn.Module, taken: Moments) -> nn.Module:
    """The dense model with the columns of the heads that go at zero, by its own modules."""
    zeroed = copy.deepcopy(model)
    for site in sites_of(zeroed).heads:
        own = taken.sites[site.name]
        assert isinstance(own, HeadMoments), site.name
        if not site.keeps_heads:
            weight = site.last.weight.detach().double()
            kept = kept_heads(weight, own, DROPPED, DROPPED.heads_left(site.heads))
            gone = torch.ones(site.heads, site.v, dtype=torch.bool)
            gone[kept] = False
            site.last.weight.data[:, gone.flatten()] = 0.0
    return zeroed


def saved_and_loaded(reduced: nn.Module, dense: Checkpoint, path: Path) -> nn.Module:
    save(Checkpoint(model=reduced, architecture=dense.architecture, lineage={}), path)
    return load_checkpoint(path).model


CHECKPOINTS: dict[str, Any] = {
    "plain": lambda: tiny.checkpoint(num_heads=4),
    "q/k norm": lambda: tiny.checkpoint(num_heads=4, qk_norm=True),
}


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_heads_dropped_are_columns_at_zero(name: str, tmp_path: Path) -> None:
    """Whatever is told by head goes with it: biases, angles, scales. Saved and loaded; costs as the site foretells."""
    dense: Checkpoint = CHECKPOINTS[name]()
    model = dense.model
    source = opened(model, 4, tmp_path)
    taken = calibrate(dense, source, batch_size=4)
    reduction = reduce(model, taken, DROPPED)
    batch = torch.cat([each for each in source.batches(4) if isinstance(each, Tensor)])
    exact, got = outputs(without(model, taken), batch), outputs(reduction.model, batch)
    assert float((got - exact).norm() / exact.norm()) < 1e-5
    heads = {site.name: site for site in sites_of(model).heads}
    leaving = {name for name, site in heads.items() if not site.keeps_heads and site.heads > 1}
    assert {report.site for report in reduction.sites} == leaving
    for site in sites_of(reduction.model).heads:
        dense_site = heads[site.name]
        stay = DROPPED.heads_left(dense_site.heads) if site.name in leaving else dense_site.heads
        assert site.heads == stay
        width = replace(dense_site.width, heads=stay if stay < dense_site.heads else None)
        assert dense_site.macs(width, site.geometry, 50) == site.macs(site.width, site.geometry, 50)
        if dense_site.last.bias is not None:
            own, expected = site.parameters(site.width, site.geometry), dense_site.parameters(width, site.geometry)
            assert own == expected
    again = saved_and_loaded(reduction.model, dense, tmp_path / "model")
    for key, value in reduction.model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    torch.testing.assert_close(outputs(again, batch), got, rtol=0.0, atol=2e-6)  # bits hang on where weights lie
    if leaving:
        assert parameters(again) < parameters(model)
        assert macs(again) < macs(model)


def test_what_mixes_heads_keeps_them() -> None:
    inside = next(site for site in sites_of(vit_forms.checkpoint("norms inside").model).heads if site.norm is not None)
    assert "before the output projection mixes all heads" in inside.keeps_heads
