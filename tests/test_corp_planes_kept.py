"""CORP's per-image system taken for some planes alone, and halves of the images that choose how strong its ridge is."""

import pytest
import torch

from calib.moments import HeadMoments
from calib.sites import HeadTaps
from corp_deploy.algebra import planes
from corp_deploy.algebra.queries_keys import residual_per_image
from corp_deploy.algebra.ridges import ridges_from
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.kept_dims import kept_dims, kept_widths, narrower
from corp_deploy.reduction.logits import system_of
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.moments import splits_at
from corp_deploy.reduction.rope_planes import kept_planes
from corp_deploy.reduction.validation_split import in_splits
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.pairs import TracedPairs
from ground.errors import BadInput
from tests.timm_models import checkpoint, method, moments, opened

FORM = "learned angles"


@pytest.fixture(scope="module")
def whole() -> Checkpoint:
    return checkpoint(FORM)


def taps(whole: Checkpoint) -> list[HeadTaps]:
    return [each for site in sites_of(whole.model).every if isinstance(site, TracedPairs) for each in site.listening()]


@pytest.fixture(scope="module")
def kept(whole: Checkpoint) -> dict[str, torch.Tensor]:
    return kept_dims(whole.model, moments(FORM), kept_widths(whole.model, taps(whole), (0.5,), 8))


def test_whole_planes_are_kept(kept: dict[str, torch.Tensor]) -> None:
    for name, dims_HK in kept.items():
        statistics = moments(FORM).sites[name]
        assert isinstance(statistics, HeadMoments)
        assert dims_HK.shape == (3, 8)
        for head, dims in enumerate(dims_HK.tolist()):
            energy = [
                float(statistics.energy_HD[head, plane] + statistics.energy_HD[head, plane + 8]) for plane in range(8)
            ]
            best = sorted(sorted(range(8), key=energy.__getitem__)[-4:])
            assert dims == best + [plane + 8 for plane in best]
            assert kept_planes(statistics.energy_HD, 8)[head].tolist() == best


def test_a_restricted_system_reduces_as_the_whole_one_does(whole: Checkpoint, kept: dict[str, torch.Tensor]) -> None:
    statistics = Statistics(attention_system=True, kept=kept)
    taken = calibrate(whole, opened(whole.model), batch_size=8, statistics=statistics)
    asked = method("corp", mlp_sparsity=None)
    one, other = (reduce(whole.model, each, asked) for each in (moments(FORM), taken))
    for exact, site in zip(one.sites, other.sites, strict=True):
        assert site.error == pytest.approx(exact.error, rel=1e-6)
        assert site.error <= site.error_uncompensated
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    with pytest.raises(BadInput, match="covers 8 of 16 dimensions; expected a width of 4, 8"):
        reduce(whole.model, taken, method("corp", mlp_sparsity=None, attention_sparsity=0.25, align_head=4))
    full = reduce(whole.model, taken, method("corp", mlp_sparsity=None, attention_sparsity=0.0))
    assert all(site.error == 0.0 for site in full.sites)


def test_sparsities_on_offer_leave_whole_planes(whole: Checkpoint) -> None:
    for _, widths in narrower(whole.model, taps(whole), 3):
        assert all(width % 2 == 0 for width in widths.values()), widths


def test_halves_of_the_images_choose_a_ridge(whole: Checkpoint) -> None:
    """The factors of either half lose least of the logits of the other with the strength that is reported."""
    statistics = Statistics(attention_system=True)
    taken = in_splits(
        opened(whole.model),
        torch.arange(24) // 4,
        lambda half, number: calibrate(whole, half, batch_size=8, statistics=statistics),
        seed=0,
    )
    asked = method("corp", mlp_sparsity=None)
    for report in reduce(whole.model, taken, asked).sites:
        site = sites_of(whole.model).by_name[report.site]
        both = taken.sites[site.name]
        assert isinstance(both, HeadMoments)
        splits = splits_at(site, taken, both, torch.device("cpu"))
        assert splits is not None
        kept_HK = kept_planes(both.energy_HD, 8)
        lost: dict[float, float] = {}
        for strength in ridges_from(asked.ridge_rel):
            for own, other in (splits, splits[::-1]):
                fitted = planes.logit(system_of(site.name, own), kept_HK, ridge_rel=strength)
                seen = system_of(site.name, other)
                nothing = torch.zeros_like(fitted.q_map_HRD)
                left = residual_per_image(seen, fitted.q_map_HRD, fitted.k_map_HRD).sum()
                share = left / residual_per_image(seen, nothing, nothing).sum()
                lost[strength] = lost.get(strength, 0.0) + 0.5 * float(share)
        assert report.ridge_fit is not None
        assert report.ridge_fit.share_held_out == pytest.approx(min(lost.values()), rel=1e-9)
        assert lost[report.ridge_fit.strength] == pytest.approx(min(lost.values()), rel=1e-9)
