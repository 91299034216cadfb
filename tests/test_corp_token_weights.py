"""A family's token weights reach every statistic."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.images import open_images
from calib.inputs import Inputs
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec
from corp_deploy.reduction.calibrate import Statistics, calibrate
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
    monkeypatch.setattr(traced_model, "token_weights", weights_of_images)
    weighted = calibrate(checkpoint, images, batch_size=4, statistics=Statistics())
    total = float(weights_of_images(checkpoint.model, torch.from_numpy(pixels)).double().sum())
    for name in plain.sites:
        assert plain.sites[name].tokens == 11 * TOKENS
        assert weighted.sites[name].tokens == pytest.approx(total, rel=1e-9)
