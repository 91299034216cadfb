"""Every form of timm's VisionTransformer with redundancy planted at every site, and its statistics counted by hand."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments, HeadMoments
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.widths import HeadWidths
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from tests import tiny
from tests.vit_forms import FORMS, REDUCED, checkpoint, method, moments, opened


def plant_channels_(site: ChannelSite) -> None:
    """The second half of the channels are copies of the first."""
    for first in site.firsts:
        for rows in (first.weight, first.bias):
            if rows is not None:
                by_channel = rows.view(site.rows // len(site.firsts), site.width, -1)
                half = site.width // 2
                by_channel[:, half : 2 * half] = by_channel[:, :half]


def plant_heads_(site: HeadSite) -> None:
    """The second half of a head's dimensions are mixes of the first, wherever dimensions may be mixed."""
    mix = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 8**0.5
    parts = [*(() if site.keeps_qk else (0, 1)), *(() if site.keeps_v else (2,))]
    for rows in (site.first.weight, site.first.bias):
        if rows is not None:
            by_head = rows.view(3, site.heads, 16, -1)
            by_head[parts, :, 8:] = mix @ by_head[parts, :, :8]


def planted(form: str) -> Checkpoint:
    dense = checkpoint(form)
    model = copy.deepcopy(dense.model).requires_grad_(False)
    for channels in sites_of(model).channels:
        plant_channels_(channels)
    for heads in sites_of(model).heads:
        plant_heads_(heads)
    return replace(dense, model=model)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
def test_planted_redundancy_goes_at_no_loss(form: str) -> None:
    """`best` at half the width everywhere."""
    dense = planted(form)
    # Its stem of convolutions leaves few tokens of such small images.
    count = 192 if form == "gate behind a norm" else 24
    taken = calibrate(dense, opened(dense.model, count), batch_size=8)
    narrower = reduce(dense.model, taken, method(geometry="square")).model
    for before, after in zip(sites_of(dense.model).channels, sites_of(narrower).channels, strict=True):
        assert after.width == before.width // 2
    for site in sites_of(narrower).heads:
        assert site.width == HeadWidths(qk=16 if site.keeps_qk else 8, v=16 if site.keeps_v else 8)
    size = FORMS[form][1]["img_size"]
    images = torch.from_numpy(tiny.images(5, seed=3, size=size))
    with torch.inference_mode():
        exact = dense.model(images)
        assert float((narrower(images) - exact).norm() / exact.norm()) < 1e-3


def heard(model: nn.Module, site_last: nn.Linear, images: Tensor) -> Tensor:
    """What enters a layer [X,K], image by image."""
    rows: list[Tensor] = []
    handle = site_last.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].double().flatten(0, 1)))
    with torch.inference_mode():
        for image in images:
            model(image[None])
    handle.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("form", REDUCED)
def test_statistics_are_those_of_a_loop_over_images(form: str) -> None:
    """To the rounding of a float32 model, whose products depend on how many images go through it at once."""
    model = checkpoint(form).model
    pixels = next(iter(opened(model).batches(24)))
    assert isinstance(pixels, Tensor)
    taken = moments(form)
    for site in sites_of(model).linear:
        statistics, x_XK = taken.sites[site.name], heard(model, site.last, pixels)
        if isinstance(statistics, ChannelMoments):
            assert statistics.tokens == len(x_XK)
            got = statistics.mean_F, statistics.second_FF
        else:
            assert isinstance(statistics, HeadMoments)
            got = statistics.z_mean_C, statistics.z_second_CC
        for sums, exact in zip(got, (x_XK.mean(dim=0), x_XK.mT @ x_XK / len(x_XK)), strict=True):
            assert float((sums - exact).norm()) < 1e-6 * float(exact.norm())
