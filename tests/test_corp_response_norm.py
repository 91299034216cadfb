"""ConvNeXt V2: channels that are scaled by their norms over the image, whose mean outlives those that are left out."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments
from corp_deploy.algebra.shares import mean_from_kept
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import sites_of
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests import tiny
from tests.small_models import CONVNEXT, error, opened, outputs, pixels, small

NAME = "convnextv2_atto"
HALF = {"mlp_sparsity": 0.5, "align_hidden": 8}


def channel_sites(model: nn.Module) -> list[ChannelSite]:
    return [site for site in sites_of(model).every if isinstance(site, ChannelSite)]


def norms_heard(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """By site and image [B,F]: the norm of each channel behind the activation, position by position in float64."""
    heard: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(f"{site.name}.act").register_forward_hook(
            lambda _, __, out, site=site: heard.__setitem__(
                site.name, sum(row.double().square() for row in out.flatten(1, -2).unbind(1)).sqrt()
            )
        )
        for site in sites_of(model).every
    ]
    outputs(model, images)
    for handle in handles:
        handle.remove()
    return heard


def test_timms_weights_make_the_same_function(tmp_path: Path) -> None:
    arguments = {key: CONVNEXT[key] for key in ("depths", "dims", "num_classes")}
    theirs = timm.create_model(NAME, **arguments).eval()
    tiny.enliven(theirs, 0)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = load_dense(NAME, weights=tmp_path / "weights.pth", kwargs={**arguments, "img_size": [64, 96]})
    assert not ours.notes
    assert len(channel_sites(ours.model)) == 5
    assert error(ours.model, theirs, pixels(ours.model, 3, size=64)) < 1e-6


def test_the_norms_statistics_are_those_of_a_loop_over_images(tmp_path: Path) -> None:
    model = small(NAME).model
    moments = calibrate(small(NAME), opened(model, 16, tmp_path), batch_size=8)
    for name, norms_BF in norms_heard(model, pixels(model, 16)).items():
        statistics = moments.sites[f"{name}.grn"]
        assert isinstance(statistics, ChannelMoments)
        assert statistics.tokens == 16
        sum_F, gram_FF = torch.zeros_like(norms_BF[0]), torch.zeros(norms_BF.shape[1], norms_BF.shape[1]).double()
        for norms_F in norms_BF:
            sum_F, gram_FF = sum_F + norms_F, gram_FF + torch.outer(norms_F, norms_F)
        torch.testing.assert_close(statistics.sum_F, sum_F, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(statistics.gram_FF, gram_FF, rtol=1e-6, atol=0.0)


def drawn_norms(case: str) -> Tensor:
    """Of twelve channels, the first six of which stay [B,F]."""
    generator = torch.Generator().manual_seed(0)
    norms_BF = torch.rand(40, 12, generator=generator).double() + 0.5
    if case == "multiples":
        norms_BF[:, 6:] = norms_BF[:, :6] * torch.linspace(0.1, 5.0, 6).double()
    if case == "few images":
        norms_BF = norms_BF[:3]
    if case == "silent channels":
        norms_BF[:, :2] = 0.0
    return norms_BF


@pytest.mark.parametrize("case", ["random", "multiples", "few images", "silent channels"])
def test_the_mean_is_the_weakest_ridge_regression_without_negative_weights(case: str) -> None:
    """By lstsq on the norms themselves, with rows below them that pull toward equal shares of a fixed proportion."""
    norms_BF, weight_F, kept_K = drawn_norms(case), torch.full((12,), 1 / 12).double(), torch.arange(6)
    second_FF = norms_BF.T @ norms_BF / len(norms_BF)
    got_K = mean_from_kept(second_FF, weight_F, kept_K)
    assert bool((got_K >= 0.0).all())
    kept_BK, mean_B = norms_BF[:, :6], norms_BF.mean(dim=1)
    proportion = torch.linalg.lstsq(kept_BK.sum(dim=1, keepdim=True), mean_B[:, None]).solution.squeeze()
    answers = []
    for power in range(-10, 5):
        ridge = 10.0**power * kept_BK.square().mean()
        rows = torch.cat([kept_BK / len(norms_BF) ** 0.5, ridge.sqrt() * torch.eye(6).double()])
        targets = torch.cat([mean_B / len(norms_BF) ** 0.5, ridge.sqrt() * proportion.expand(6)])
        answers.append(torch.linalg.lstsq(rows, targets[:, None], driver="gelsd").solution.squeeze(1))
    expected_K = next(answer for answer in answers if bool((answer >= -1e-12).all()))
    torch.testing.assert_close(kept_BK @ got_K, kept_BK @ expected_K, rtol=1e-6, atol=1e-9)
    if case == "multiples":
        torch.testing.assert_close(kept_BK @ got_K, mean_B, rtol=1e-6, atol=0.0)


def test_the_mean_of_all_is_kept_on_other_images_and_saved(tmp_path: Path) -> None:
    """The plain mean of the norms that stay is another one."""
    dense = small(NAME)
    model = dense.model
    moments = calibrate(dense, opened(model, 64, tmp_path), batch_size=8)
    done = reduce(model, moments, method_from_preset("best", **HALF)).model
    others = pixels(model, 16, seed=5)
    heard = norms_heard(model, others)
    first = channel_sites(done)[0]
    assert first.norm is not None
    means_B = heard[first.name].mean(dim=1)
    kept_BK = norms_heard(done, others)[first.name]
    got_B = (kept_BK @ first.norm.mean.weight.double().T).squeeze(1)
    plain_B = kept_BK.mean(dim=1)
    assert float((got_B - means_B).norm()) < 0.3 * float((plain_B - means_B).norm())
    plain = reduce(model, moments, method_from_preset("best", **HALF)).model
    with torch.no_grad():
        for site in channel_sites(plain):
            assert site.norm is not None
            site.norm.mean.weight.fill_(1.0 / site.width)
    assert error(done, model, others) < error(plain, model, others)
    save(Checkpoint(model=done, architecture=dense.architecture, lineage={}), tmp_path / "m")
    again = load_checkpoint(tmp_path / "m").model
    assert torch.equal(outputs(again, others), outputs(done, others))


def test_what_can_not_be_done_to_it_is_said(tmp_path: Path) -> None:
    dense = small(NAME)
    model, images = dense.model, opened(dense.model, 16, tmp_path)
    moments = calibrate(dense, images, batch_size=8)
    without = calibrate(dense, images, batch_size=8, statistics=Statistics(patterns=("*.mlp",)))
    with pytest.raises(BadInput, match=r"stages\.0\.blocks\.0\.mlp\.grn: the moments hold no statistics of the norms"):
        reduce(model, without, method_from_preset("best", **HALF))
    done = reduce(model, moments, method_from_preset("best", **HALF)).model
    with pytest.raises(BadInput, match=r"polish layer: .* have a norm of their hidden channels"):
        polished(model, done, images, PolishOptions(how="layer", steps=1, batch_size=4))
    folded = reduce(model, moments, method_from_preset("grail-fold", **HALF), images=images)
    assert not folded.sites
