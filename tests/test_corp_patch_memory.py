"""Calibration within a memory: patches of some channels alone, and what is made of them."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional

from calib import memory
from calib.memory import bytes_needed, shapes_of_sites
from calib.moments import Moments
from calib.patch_moments import PatchMoments
from corp_deploy.cli import main
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.family import example_of, sites_of
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.widths import ConvWidths
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import save
from ground.errors import BadInput
from tests.small_convnets import checkpoint, opened, pixels

NAME, SITE = "resnet18", "layer1.0"
BEST = method_from_preset("best", conv_sparsity=0.5, align_conv=8, ridge_rel=1e-9)


def whole_bytes() -> int:
    model = checkpoint(NAME).model
    taps = calibration_taps(model, sites_of(model))
    return sum(bytes_needed(shapes_of_sites(model, taps, example=example_of(model), device="cpu")).values())


@cache
def moments(share: float | None, seed: int = 0) -> Moments:
    own = checkpoint(NAME)
    statistics = Statistics(patch_bytes=None if share is None else int(share * whole_bytes()))
    with TemporaryDirectory() as folder:
        images = opened(own.model, 48, Path(folder), seed)
        return calibrate(own, images, batch_size=16, statistics=statistics)


def chosen(taken: Moments) -> torch.Tensor:
    own = taken.sites[f"{SITE}.conv2"]
    assert isinstance(own, PatchMoments)
    assert own.channels_GR is not None
    return own.channels_GR[0]


def site_of(model: torch.nn.Module) -> ConvSite:
    (site,) = [each for each in sites_of(model).every if each.name == SITE]
    assert isinstance(site, ConvSite)
    return site


def test_the_largest_keep_fewer_and_all_sums_fit() -> None:
    taken = moments(0.5)
    size = sum(
        each.numel() * each.element_size()
        for site in taken.sites.values()
        if isinstance(site, PatchMoments)
        for each in (site.gram_GUU, site.sum_GU, site.map_gram_GCC)
    )
    assert size <= 0.5 * whole_bytes()
    assert 8 <= len(chosen(taken)) < 64
    assert isinstance(moments(1.0).sites[f"{SITE}.conv2"], PatchMoments)
    assert moments(1.0).sites[f"{SITE}.conv2"].channels_GR is None  # type: ignore[union-attr]


def test_it_is_least_squares_toward_the_dense_outputs() -> None:
    """Held against lstsq over every patch of every image, of what all channels gave."""
    own, taken, images = checkpoint(NAME), moments(0.5), pixels(48)
    kept = 16
    reduction = reduce(own.model, taken, BEST, widths={SITE: ConvWidths(channels=(kept,))})
    heard: list[torch.Tensor] = []
    for model in (own.model, reduction.model):
        reader = site_of(model).convolution("conv2")
        handle = reader.register_forward_pre_hook(lambda _, args: heard.append(args[0].double()))
        with torch.inference_mode():
            model(images)
        handle.remove()
    dense, new = (site_of(model).convolution("conv2") for model in (own.model, reduction.model))
    assert dense.bias is not None
    assert new.bias is not None
    target = functional.conv2d(heard[0], dense.weight.double(), dense.bias.double(), padding=1)
    target_XO = target.flatten(2).mT.flatten(0, 1)
    u_XU = functional.unfold(heard[1], 3, padding=1).mT.flatten(0, 1)
    with_one = torch.cat([u_XU, torch.ones(len(u_XU), 1, dtype=torch.float64)], dim=1)
    best = torch.linalg.lstsq(with_one, target_XO, driver="gelsd").solution
    least = float((target_XO - with_one @ best).square().sum(dim=1).mean())
    ours = float((target_XO - u_XU @ new.weight.double().flatten(1).T - new.bias.double()).square().sum(dim=1).mean())
    (report,) = reduction.sites
    assert report.error == pytest.approx(ours, rel=1e-4)
    assert least <= ours <= 1.001 * least
    rows = {tuple(row.tolist()) for row in site_of(reduction.model).convolution("conv1").weight.flatten(1)}
    among = site_of(own.model).convolution("conv1").weight[chosen(taken)].flatten(1)
    assert rows <= {tuple(row.tolist()) for row in among}


def test_the_error_curve_ends_where_the_choice_begins() -> None:
    """What is lost by all channels without patches is the least that a choice among the others loses."""
    own, taken = checkpoint(NAME), moments(0.5)
    every = len(chosen(taken))
    eight = every // 8 * 8
    at_most = reduce(own.model, taken, BEST, widths={SITE: ConvWidths(channels=(eight,))}).sites[0]
    fewer = reduce(own.model, taken, BEST, widths={SITE: ConvWidths(channels=(8,))}).sites[0]
    everything = reduce(own.model, moments(None), BEST, widths={SITE: ConvWidths(channels=(eight,))}).sites[0]
    assert everything.error < at_most.error < fewer.error
    assert at_most.energy == pytest.approx(everything.energy, rel=1e-5)


def test_held_out_images_judge_it() -> None:
    own = checkpoint(NAME)
    widths = {SITE: ConvWidths(channels=(16,))}
    (report,) = reduce(own.model, moments(0.5), BEST, widths=widths, held_out=moments(0.5, 1)).sites
    assert report.held_out is not None
    assert report.held_out.error > report.error


def test_a_site_left_whole_stays_as_it_is() -> None:
    own = checkpoint(NAME)
    reduction = reduce(own.model, moments(0.5), replace(BEST, conv_sparsity=0.0))
    for name, weight in own.model.state_dict().items():
        assert torch.equal(reduction.model.state_dict()[name], weight)


@pytest.mark.parametrize(("preset", "kept"), [("best", 56), ("grail", 16)])
def test_what_needs_other_patches_is_refused(preset: str, kept: int) -> None:
    method = method_from_preset(preset, conv_sparsity=0.5, align_conv=8)
    with pytest.raises(BadInput, match=r"patches of \d+ of 64 channels .*--patch-memory.*remove more there"):
        reduce(checkpoint(NAME).model, moments(0.5), method, widths={SITE: ConvWidths(channels=(kept,))})


def test_too_little_memory_is_said() -> None:
    with pytest.raises(BadInput, match="GB more than are available"):
        moments(0.01)


def test_where_the_sums_do_not_fit_the_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = checkpoint(NAME)
    monkeypatch.setattr(memory, "bytes_available", lambda device: whole_bytes() // 2)
    save(own, tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(4).numpy())
    words = ["calibrate", "--model", tmp_path / "dense", "--images", tmp_path / "images.npy", "-o", tmp_path / "m"]
    said = CliRunner().invoke(main, list(map(str, words)))
    assert said.exit_code == 2
    named = re.search(r"\(d\) --patch-memory (\S+): patches of the largest convolutions of fewer channels", said.output)
    assert named is not None, said.output
    fits = CliRunner().invoke(main, [*map(str, words), "--patch-memory", named[1]])
    assert fits.exit_code == 0, fits.output
    assert f"patches of {SITE}.conv2: " in fits.output
