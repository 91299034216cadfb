"""Warnings about calibration inputs that make a reduction's figures too good, or have other statistics than real ones.

A fit of K weights to fewer independent rows than K repairs these rows exactly, and then reports that nothing is lost.
Rows (tokens, places of a map) of one image are alike, so an image counts for ROWS_OF_IMAGE of them at most, and copies
of an image count once. In texts every token counts. A layer behind pooling has one row per image and would need as many
images as it has inputs, so it is skipped where other layers have more rows.
"""

import math
from contextlib import suppress

import numpy as np
from torch import nn

from calib.collect import PIXEL_RANGE
from calib.images import Images
from calib.moments import Moments
from calib.related import count_pictures
from calib.store import rows_and_widths
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec
from corp_deploy.families.timm_images import ImageSpec

ROWS_OF_IMAGE = 32
LEAST_INPUTS = 8
ENOUGH = 256
"""Different pictures below which more are advised: between the 37 and 297 of docs/measured/real-models.md."""
FAR = 8.0
"""The limit of values, as a multiple of the largest one that the preprocessing gives."""


def few_inputs_warning(moments: Moments, noun: str) -> str:
    """Return a warning if the moments are of too few different inputs, else an empty text."""
    distinct = len(moments.image_ids.unique()) or moments.images
    most = ROWS_OF_IMAGE if noun == Images.noun else math.inf
    sizes = {name: (rows / moments.images, width) for name, (rows, width) in rows_and_widths(moments).items()}
    all_pooled = all(rows <= 1.0 for rows, _ in sizes.values())
    needed = {
        name: (max(LEAST_INPUTS, math.ceil(width / max(1.0, min(rows, most)))), width)
        for name, (rows, width) in sizes.items()
        if rows > 1.0 or all_pooled
    }
    name, (least, width) = max(needed.items(), key=lambda each: each[1][0])
    if distinct >= least:
        return ""
    copies = f" ({moments.images} with copies)" if distinct < moments.images else ""
    own = noun.removesuffix("s") if distinct == 1 else noun
    return (
        f"the moments are of {distinct} different {own}{copies}; {name}, {width} wide, needs at least {least}: with "
        f"fewer, far more can be lost on other {noun} than is reported; calibrate on more, and judge on held-out ones"
    )


def few_pictures_advice(moments: Moments) -> str:
    """Return advice to calibrate on more pictures, an empty text if there are ENOUGH of them."""
    count = len(moments.group_ids.unique()) or count_pictures(moments.fingerprints)
    if not 0 < count < ENOUGH:
        return ""
    return (
        f"the images show {count} different picture{'s'[: count > 1]}; a few hundred, of every kind that the model "
        "will see, make a reduction lose less on others; further crops of the same pictures hardly do"
    )


def far_range_warning(low: float, high: float, spec: ImageSpec) -> str:
    """Return a warning if the images have values that the model's mean and std hardly produce, else an empty text."""
    if spec.normalisation_refusal:
        return ""
    ends = spec.normalisation.images(np.array([0, 255], np.uint8)[:, None, None, None])
    least, most = float(ends.min()), float(ends.max())
    is_far = max(abs(low), abs(high)) > FAR * max(abs(least), abs(most))
    is_scaled = 0.0 <= low < high <= 1.0 and least < -0.5
    if not is_far and not is_scaled:
        return ""
    if is_scaled:
        look = "scaled to 0 to 1 and not normalised"
    else:
        look = "like pixels from 0 to 255" if low >= 0.0 and high <= 255.0 else "normalised in another way"
    return (
        f"the images have values from {low:.4g} to {high:.4g}, and the model's mean and std give {least:.3g} to "
        f"{most:.3g}: they look {look}; give uint8 pixels or "
        "image files, or normalise them, unless the model itself does"
    )


def warnings_of_moments(model: nn.Module, moments: Moments, noun: str = "inputs") -> list[str]:
    """Return warnings about the calibration inputs, as far as the moments record them; images are called images."""
    takes_images = traced_model.input_spec(model).medium == Images.noun
    found = [few_inputs_warning(moments, Images.noun if takes_images else noun)]
    ranges = moments.lineage.get(PIXEL_RANGE)
    if takes_images and ranges is not None:
        with suppress(ValueError):  # the text holds no numbers; verify refuses it
            ends = [float(end) for pair in ranges.split("+") for end in pair.split(":")]
            found.append(far_range_warning(min(ends), max(ends), image_spec(model)))
    return list(filter(None, found))
