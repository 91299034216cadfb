"""A family's token weights reach every statistic: in the pass over a model's sites and on the closed loop's streams."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.images import open_images
from calib.inputs import Inputs
from calib.moments import HeadMoments
from corp_deploy.families import timm_vit
from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.families.steps import Branch
from corp_deploy.reduction.branch_sums import head_moments
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.streams import Streams
from tests import tiny

TOKENS = 17


def weights_of_images(_: nn.Module, inputs: Inputs) -> Tensor:
    """By what an image holds: the same for the same image, whatever its batch; whole and other numbers, and zeros."""
    assert isinstance(inputs, Tensor)
    return (inputs.flatten(1)[:, :TOKENS] * 3.0).clamp(min=0.0)


def test_moments_count_tokens_by_the_familys_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, pixels = tiny.checkpoint(), tiny.images(11)
    np.save(tmp_path / "images.npy", pixels)
    spec = image_spec(checkpoint.model)
    images = open_images(tmp_path / "images.npy", image_shape=spec.shape, transform=spec.transform())
    plain = calibrate(checkpoint, images, batch_size=4, statistics=Statistics())
    monkeypatch.setattr(timm_vit, "token_weights", weights_of_images, raising=False)
    weighted = calibrate(checkpoint, images, batch_size=4, statistics=Statistics())
    total = float(weights_of_images(checkpoint.model, torch.from_numpy(pixels)).double().sum())
    for name in plain.sites:
        assert plain.sites[name].tokens == 11 * TOKENS
        assert weighted.sites[name].tokens == pytest.approx(total, rel=1e-9)


def first_attention(model: nn.Module) -> Branch:
    return next(step for step in timm_vit.steps(model) if isinstance(step, Branch))


def test_the_closed_loops_heads_count_no_padding() -> None:
    """Streams with tokens that are not there give the sums of the streams without them.

    The attention is asked for q and k of each token alone; z depends on all of them, so it isn't compared.
    """
    model = tiny.checkpoint().model
    branch = first_attention(model)
    (site,) = [site for site in sites_of(model).heads if site.name == branch.name]
    x_BNC = torch.randn(8, 9, 48, generator=torch.Generator().manual_seed(0))
    padded_BNC = torch.cat([x_BNC, 1e3 * torch.ones(8, 4, 48)], dim=1)
    weights_BN = torch.cat([torch.ones(8, 9), torch.zeros(8, 4)], dim=1)
    with torch.no_grad():
        short = head_moments(branch, site, Streams([(x_BNC, None)]), system=True)
        long = head_moments(branch, site, Streams([(padded_BNC, weights_BN)]), system=True)
    assert short.tokens == long.tokens == 8 * 9
    for name in HeadMoments.__slots__:
        value, expected = getattr(long, name), getattr(short, name)
        if isinstance(value, Tensor) and name not in ("z_sum_C", "zz_CC"):
            assert float((value - expected).norm()) < 1e-6 * float(expected.norm()), name
