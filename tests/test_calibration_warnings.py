"""Warnings of calibrations on too few different images or on values that no preprocessing gives."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import corp_deploy
from calib.fingerprints import Fingerprints
from calib.moments import ChannelMoments, Moments
from calib.store import load_moments, rows_and_widths, save_moments
from corp_deploy.families.family import image_spec
from corp_deploy.reduction.calibration_warnings import (
    ENOUGH,
    far_range_warning,
    few_inputs_warning,
    few_pictures_advice,
)
from corp_deploy.store.checkpoint import save as save_model
from tests import tiny


def moments_of(ids: list[int], *, width: int = 192, rows: int = 17) -> Moments:
    site = ChannelMoments(
        tokens=float(rows * len(ids)), eps=0.0, sum_F=torch.ones(width, dtype=torch.float64),
        gram_FF=torch.eye(width, dtype=torch.float64), active_F=torch.ones(width, dtype=torch.float64),
    )  # fmt: skip
    return Moments(
        sites={"mlp": site}, lineage={}, images=len(ids), fingerprints=Fingerprints(ids=torch.tensor(sorted(ids)))
    )


@pytest.mark.parametrize("ids", [[1], [1] * 50, [1, 2, 3] * 10, list(range(11))])
def test_few_distinct_images_are_warned_of_despite_repetition(ids: list[int]) -> None:
    distinct = len(set(ids))
    copies = f" ({len(ids)} with copies)" if distinct < len(ids) else ""
    noun = "image" if distinct == 1 else "images"
    expected = f"the moments are of {distinct} different {noun}{copies}; mlp, 192 wide, needs at least 12"
    assert few_inputs_warning(moments_of(ids), "images").startswith(expected)


def test_enough_distinct_images_give_no_warning() -> None:
    assert few_inputs_warning(moments_of(list(range(12))), "images") == ""
    assert few_inputs_warning(moments_of(list(range(8)), width=4), "images") == ""
    assert "needs at least 8" in few_inputs_warning(moments_of(list(range(7)), width=4), "images")


def test_image_tokens_count_for_few_rows_and_text_tokens_for_all() -> None:
    many = moments_of(list(range(20)), width=1024, rows=10_000)
    assert "1024 wide, needs at least 32" in few_inputs_warning(many, "images")
    assert few_inputs_warning(many, "sequences") == ""


@pytest.mark.parametrize(
    ("ids", "hashes", "said"),
    [
        (range(ENOUGH), None, ""),
        (range(ENOUGH - 1), None, "the images show 255 different pictures; a few hundred"),
        ([*range(ENOUGH - 1), 0, 0], None, "the images show 255 different pictures"),
        ([7], None, "the images show 1 different picture; a few hundred"),
        (range(ENOUGH), 2, "the images show 255 different pictures"),
        (range(ENOUGH + 1), 2, ""),
    ],
)
def test_few_pictures_are_advised_against(ids: Sequence[int], hashes: int | None, said: str) -> None:
    """`hashes`: the number of first images that look alike."""
    own = moments_of([*ids])
    if hashes is not None:
        random = torch.randint(-(2**62), 2**62, (len(ids), 2), generator=torch.Generator().manual_seed(0))
        random[:hashes] = random[0]
        own = replace(own, fingerprints=Fingerprints(ids=own.image_ids, hashes_M2=random))
    assert few_pictures_advice(own).startswith(said)
    assert bool(few_pictures_advice(own)) is bool(said)


def test_groups_count_as_pictures() -> None:
    own = moments_of([*range(600)])
    assert few_pictures_advice(own) == ""
    crops = replace(own, group_ids=torch.arange(600) // 10)
    assert few_pictures_advice(crops).startswith("the images show 60 different pictures; ")


def test_rows_and_widths_of_a_file_are_those_in_memory(tmp_path: Path) -> None:
    own = moments_of([1, 2])
    save_moments(own, tmp_path / "m.safetensors")
    assert rows_and_widths(load_moments(tmp_path / "m.safetensors")) == rows_and_widths(own) == {"mlp": (34.0, 192)}


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.0, 255.0, "values from 0 to 255, and the model's mean and std give -1 to 1: they look like pix"),
        (3.0, 251.0, "they look like pixels from 0 to 255"),
        (-124.0, 151.0, "they look normalised in another way"),
        (0.0, 1.0, "they look scaled to 0 to 1 and not normalised"),
        (0.1, 0.9, "they look scaled to 0 to 1 and not normalised"),
        (-1.0, 1.0, ""),
        (-4.2, 4.4, ""),
        (0.0, 0.0, ""),
    ],
)  # fmt: skip
def test_values_far_from_the_preprocessing_are_warned_of(low: float, high: float, said: str) -> None:
    found = far_range_warning(low, high, image_spec(tiny.checkpoint().model))
    assert (said in found) if said else not found


def test_float_pixels_are_warned_of_and_byte_pixels_are_not(tmp_path: Path) -> None:
    save_model(tiny.checkpoint(), tmp_path / "dense")
    pixels = np.random.default_rng(0).integers(0, 256, (64, 3, 32, 32)).astype(np.uint8)
    floats = pixels.astype(np.float32)
    for images, words in ((floats, "like pixels"), (floats / 255, "scaled to 0 to 1"), (pixels, "")):
        found = corp_deploy.calibrate(tmp_path / "dense", images, tmp_path / "m.safetensors").warnings
        assert any(words in each for each in found) if words else not found


def test_calibrate_and_reduce_warn_of_repeated_images_and_record_it(tmp_path: Path) -> None:
    save_model(tiny.checkpoint(), tmp_path / "dense")
    copies = np.repeat(tiny.images(1), 16, 0)
    said = "the moments are of 1 different image"
    calibrated = corp_deploy.calibrate(tmp_path / "dense", copies, tmp_path / "m.safetensors")
    assert calibrated.record["warnings"] == list(calibrated.warnings)
    assert calibrated.warnings[0].startswith(said)
    reduced = corp_deploy.reduce(tmp_path / "dense", calibrated, tmp_path / "r", mlp=0.5)
    assert reduced.notes[-1].startswith(said)
    assert reduced.record["notes"][-1].startswith(said)
