"""Calibration of traced models within a memory limit, with patches of some channels only, and reductions from it."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from calib import memory
from calib.moments import Moments
from calib.patch_moments import PatchMoments
from corp_deploy.families.family import sites_of
from corp_deploy.planning.curves import compute_eliminations
from corp_deploy.planning.probe_split import set_apart
from corp_deploy.reduction.calibrate import Statistics, calibrate, choose_sites, memory_needed
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.snapshots import moments_in_splits
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.traced.models.sites import Site
from ground.errors import BadInput
from tests import tiny
from tests.command import invoked
from tests.refusals import rejects
from tests.small_convnets import checkpoint, conv_sites, images_of, pixels
from tests.traced_examples import written_by

BEST = method_from_preset("best", conv_sparsity=0.5, align_conv=8, ridge_rel=1e-9)
SIDE, COUNT, CHANNELS = 12, 64, 48


class Pair(nn.Module):
    """Two convolutions with norms, the second of which may have groups."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.input_size = (3, SIDE, SIDE)
        self.first, self.norm = nn.Conv2d(3, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS)
        self.second, self.behind = nn.Conv2d(CHANNELS, 6, 3, padding=1, groups=groups), nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 4)
        for each in (self.norm, self.behind):
            nn.init.uniform_(each.weight, 0.5, 1.5)
            assert each.running_var is not None
            nn.init.uniform_(each.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(functional.relu(self.norm(self.first(x))))
        return self.last(functional.relu(self.behind(x)).mean((2, 3)))


def noise(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


@cache
def pair(groups: int) -> Checkpoint:
    own = written_by("tests.test_traced_patch_memory.Pair", groups=groups)
    own.model.eval().requires_grad_(False)
    return own


def limit_of(own: Checkpoint, share: float | None) -> Statistics:
    if share is None:
        return Statistics()
    needed = memory_needed(own, choose_sites(own, Statistics()), Statistics())
    return Statistics(patch_bytes=int(share * sum(needed.values())))


@cache
def moments(groups: int, share: float | None = 0.4, seed: int = 1, halved: bool = False) -> Moments:
    own = pair(groups)
    with TemporaryDirectory() as folder:
        images = tiny.opened(Path(folder) / "images.npy", noise(COUNT, seed).numpy(), own.model)
        taken = partial(calibrate, batch_size=16, statistics=limit_of(own, share))
        if halved:
            return moments_in_splits(images, torch.arange(COUNT) // 2, lambda part, _: taken(own, part), seed=0)
        return taken(own, images)


def patches(taken: Moments, name: str = "second") -> PatchMoments:
    own = taken.sites[name]
    assert isinstance(own, PatchMoments)
    return own


def size_of(taken: Moments) -> int:
    tensors = [
        getattr(site, name)
        for site in taken.sites.values()
        if isinstance(site, PatchMoments)
        for name in site.__slots__
    ]
    return sum(each.nbytes for each in tensors if isinstance(each, Tensor) and each.dtype == torch.float64)


def site_of(own: Checkpoint) -> Site:
    (site,) = [each for each in sites_of(own.model).every if each.width == CHANNELS]
    return site


def reduced(groups: int, taken: Moments, width: int, **more: Any) -> Reduction:
    own = pair(groups)
    return reduce(own.model, taken, BEST, widths={site_of(own).name: width}, **more)


@pytest.mark.parametrize("groups", [1, 2])
def test_largest_site_keeps_its_strongest_channels_within_memory(groups: int) -> None:
    """A channel's score is the norm of its kernels on both sides, times the factors of the norms after them."""
    own, taken = pair(groups).model, moments(groups)
    limit = limit_of(pair(groups), 0.4).patch_bytes
    assert limit is not None
    assert size_of(taken) <= limit < size_of(moments(groups, None))
    chosen_GR = patches(taken).channels_GR
    assert chosen_GR is not None
    assert patches(moments(groups, 1.0)).channels_GR is None
    state = own.state_dict()
    gains = [state[f"{name}.weight"] / (state[f"{name}.running_var"] + 1e-5).sqrt() for name in ("norm", "behind")]
    for group in range(groups):
        scores = []
        for channel in range(each := CHANNELS // groups):
            written = state["first.weight"][group * each + channel] * gains[0][group * each + channel]
            rows = range(group * 6 // groups, (group + 1) * 6 // groups)
            read = torch.stack([state["second.weight"][row, channel] * gains[1][row] for row in rows])
            scores.append(float(written.norm() * read.norm()))
        best = sorted(sorted(range(each), key=lambda channel: -scores[channel])[: chosen_GR.shape[1]])
        assert chosen_GR[group].tolist() == best


@pytest.mark.parametrize("groups", [1, 2])
def test_recovery_is_least_squares_toward_the_dense_outputs(groups: int) -> None:
    """lstsq over every patch of every image gives the expected weights, before the norm."""
    own, taken = pair(groups).model, moments(groups)
    reduction = reduced(groups, taken, 8)
    new, seen = reduction.model.state_dict(), noise(COUNT, 1)
    dense: Any = own
    x = functional.relu(dense.norm(dense.first(seen))).double()
    state = {name: each.double() for name, each in own.state_dict().items()}
    target = functional.conv2d(x, state["second.weight"], state["second.bias"], padding=1, groups=groups)
    kept = [
        next(row for row in range(CHANNELS) if torch.equal(state["first.weight"][row].float(), each))
        for each in new["first.weight"]
    ]
    assert len(kept) == 8
    gain_O = state["behind.weight"] / (state["behind.running_var"] + 1e-5).sqrt()
    lost = 0.0
    for group, inside in enumerate(np.array_split(np.array(kept), groups)):
        assert {each // (CHANNELS // groups) for each in inside} == {group}
        u_XU = functional.unfold(x[:, inside], 3, padding=1).mT.flatten(0, 1)
        with_one = torch.cat([u_XU, torch.ones(len(u_XU), 1, dtype=torch.float64)], dim=1)
        rows = slice(group * 6 // groups, (group + 1) * 6 // groups)
        target_XO = target[:, rows].flatten(2).mT.flatten(0, 1)
        best = torch.linalg.lstsq(with_one, target_XO, driver="gelsd").solution
        ours = torch.cat([new["second.weight"][rows].flatten(1).T, new["second.bias"][rows][None]]).double()
        assert float((ours - best).norm() / best.norm()) < 1e-5
        lost += float(((target_XO - with_one @ best) * gain_O[rows]).square().sum(dim=1).mean())
    (report,) = reduction.sites
    assert report.error == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_error_curve_ends_at_the_restricted_choice(groups: int) -> None:
    """No choice among channels with patches loses less than removing all channels without patches."""
    taken, own = moments(groups), pair(groups)
    order = compute_eliminations(own.model, taken, BEST)[site_of(own).name]
    chosen_GR = patches(taken).channels_GR
    assert chosen_GR is not None
    every = chosen_GR.numel() // 8 * 8
    at_most, fewer = (reduced(groups, taken, width).sites[0] for width in (every, 8))
    everything = reduced(groups, moments(groups, None), every).sites[0]
    assert everything.error < at_most.error < fewer.error
    assert at_most.energy == pytest.approx(everything.energy, rel=1e-5)
    assert order.error_at(8) == pytest.approx(fewer.error, rel=1e-4)
    assert order.error_at(CHANNELS) == 0.0
    first_G1 = torch.arange(groups)[:, None] * (CHANNELS // groups)
    assert set(order.kept(8).tolist()) <= set((chosen_GR + first_G1).flatten().tolist())


def test_ridge_is_chosen_on_halves_and_judged_on_held_out_images() -> None:
    (report,) = reduced(2, moments(2, halved=True), 16, held_out=moments(2, seed=2)).sites
    assert report.ridge_fit is not None
    assert report.held_out is not None
    assert report.error < report.held_out.error < 1.5 * report.error
    (by_all,) = reduced(2, moments(2, halved=True), 16, held_out=moments(2, None, seed=2)).sites
    assert by_all.held_out is not None
    assert by_all.held_out.error == pytest.approx(report.held_out.error, rel=1e-4)
    rejects("judge it have patches of other channels", reduced, 2, moments(2), 16, held_out=moments(2, 0.3, seed=2))


@pytest.mark.parametrize(("preset", "kept"), [("best", 40), ("grail", 8)])
def test_options_that_need_other_patches_are_refused(preset: str, kept: int) -> None:
    asked = method_from_preset(preset, conv_sparsity=0.5, align_conv=8)
    own = pair(2)
    with pytest.raises(BadInput, match=r"patches of \d+ of 48 channels .*--patch-memory.*remove more there"):
        reduce(own.model, moments(2), asked, widths={site_of(own).name: kept})


def whole_bytes(own: Checkpoint) -> int:
    """Return the bytes of all sums except those that only streams need."""
    statistics = Statistics(patch_bytes=10**12)
    return sum(memory_needed(own, choose_sites(own, statistics), statistics).values())


def test_streams_are_summed_only_on_request() -> None:
    """Under a memory limit, streams can't be narrowed without statistics of all their readers."""
    own, source = checkpoint("resnet18"), images_of("resnet18", 16)
    limit = Statistics(patch_bytes=whole_bytes(own) // 2)
    taken = calibrate(own, source, batch_size=16, statistics=limit)
    assert compute_eliminations(own.model, taken, BEST).keys() == {site.name for site in conv_sites(own.model)}
    with pytest.raises(BadInput, match="need more than --patch-memory") as refused:
        calibrate(own, source, batch_size=16, statistics=replace(limit, residual=True))
    enough = int(1e9 * float(str(refused.value).split("at least --patch-memory ")[1].split(",")[0]))
    with pytest.raises(BadInput, match="need more than --patch-memory"):
        choose_sites(own, Statistics(residual=True, patch_bytes=int(0.95 * enough)))
    told = Statistics(residual=True, patch_bytes=enough)
    assert sum(memory_needed(own, choose_sites(own, told), told).values()) <= enough
    rejects("sites need more than --patch-memory", choose_sites, tiny.checkpoint(), Statistics(patch_bytes=1000))


def test_budget_uses_the_collected_patches(tmp_path: Path) -> None:
    own, whole = pair(2), moments(2)
    images = tiny.opened(tmp_path / "images.npy", noise(COUNT, 1).numpy(), own.model)
    apart = set_apart(own, whole, images)
    ids = set(apart.moments.image_ids.tolist())
    left = images.subset([place for place, image in enumerate(images.ids.tolist()) if image in ids])
    assert 0 < left.count < COUNT
    sums, again = (
        patches(each) for each in (apart.moments, calibrate(own, left, batch_size=16, statistics=limit_of(own, 0.4)))
    )
    assert sums.channels_GR is not None
    assert again.channels_GR is not None
    assert torch.equal(sums.channels_GR, again.channels_GR)
    torch.testing.assert_close(sums.cross_GPU, again.cross_GPU, rtol=1e-5, atol=1e-3)


@pytest.mark.slow("models")
def test_insufficient_memory_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = checkpoint("resnet18")
    monkeypatch.setattr(memory, "bytes_available", lambda device: whole_bytes(own) // 2)
    save(own, tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(4).numpy())
    words = ["calibrate", "--model", tmp_path / "dense", "--images", tmp_path / "images.npy", "-o", tmp_path / "m"]
    said = invoked(*words, code=2)
    named = re.search(r"\(d\) --patch-memory (\S+) sums patches of fewer channels at large convolutions", said.output)
    assert named is not None, said.output
    assert re.search(r"patches of layer\S+: ", invoked(*words, "--patch-memory", named[1]).output)


def test_unreduced_site_stays_unchanged() -> None:
    own = pair(2).model
    reduction = reduce(own, moments(2), replace(BEST, conv_sparsity=0.0))
    for name, weight in reduction.model.state_dict().items():
        assert torch.equal(own.state_dict()[name], weight)


def test_too_little_memory_is_refused() -> None:
    rejects("need more than --patch-memory", moments, 1, 0.01)
