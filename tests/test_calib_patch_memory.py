"""calib.memory for convolutions: what their sums take, and how many channels of patches fit."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from calib.memory import (
    ChannelShape,
    PatchShape,
    Shape,
    bytes_needed,
    patch_channels_that_fit,
    shapes_of_sites,
)
from ground.errors import BadInput
from tests.tiny_maps import collected, images_of, taps_of, tiny_maps


def test_memory_by_formula_is_what_the_moments_take() -> None:
    model = tiny_maps()
    shapes = shapes_of_sites(model, taps_of(model), example=images_of(1), device="cpu")
    assert shapes["some"] == PatchShape(tokens=6 * 6, groups=2, channels=6, chosen=3, taps=6, outputs=12)
    needed = bytes_needed(shapes, attention_system=True)
    for name, site in collected(images_of(2), 2).sites.items():
        values = (getattr(site, field.name) for field in fields(site))
        taken = sum(each.nbytes for each in values if isinstance(each, Tensor) and each.is_floating_point())
        assert taken == needed[name], name


def wide(channels: int, groups: int = 1) -> PatchShape:
    return PatchShape(tokens=49, groups=groups, channels=channels, chosen=None, taps=9, outputs=channels * groups)


SHAPES: dict[str, Shape] = {
    "a": wide(64), "b": wide(128), "c": wide(256), "d": wide(256), "depthwise": wide(1, 512),
    "mlp": ChannelShape(tokens=1, hidden=300),
}  # fmt: skip
TOTAL = sum(bytes_needed(SHAPES).values())


def restricted(chosen: dict[str, int]) -> int:
    return sum(
        replace(shape, chosen=chosen[name]).bytes_of_moments()
        if name in chosen and isinstance(shape, PatchShape)
        else shape.bytes_of_moments()
        for name, shape in SHAPES.items()
    )


def test_nothing_is_restricted_where_everything_fits() -> None:
    assert patch_channels_that_fit(SHAPES, TOTAL) == {}


@pytest.mark.parametrize("share", [0.999, 0.9, 0.7, 0.5, 0.2, 0.06])
def test_the_largest_give_up_channels_until_it_fits(share: float) -> None:
    available = int(share * TOTAL)
    chosen = dict(patch_channels_that_fit(SHAPES, available))
    assert restricted(chosen) <= available
    assert all(8 <= count < 256 for count in chosen.values())
    assert set(chosen) in [set("cdba"[:count]) for count in range(1, 5)]
    least = next(count for count in range(5) if restricted(dict.fromkeys("cdba"[:count], 8)) <= available)
    assert len(chosen) <= least
    assert abs(chosen["c"] - chosen.get("d", chosen["c"])) <= 1 or len(chosen) == 1
    if max(chosen.values()) < 255:
        assert restricted({name: count + 3 for name, count in chosen.items()}) > available


def test_it_says_what_is_missing_where_nothing_fits() -> None:
    least = restricted(dict.fromkeys("abcd", 8))
    assert set(patch_channels_that_fit(SHAPES, least).values()) == {8}
    with pytest.raises(BadInput, match=r"6 sites need 0\.01 GB more than are available, with patches of 8 channels"):
        patch_channels_that_fit(SHAPES, least - 10_000_000)
    with pytest.raises(BadInput, match="1 sites need"):
        patch_channels_that_fit({"mlp": SHAPES["mlp"]}, 1)


def test_shapes_are_learned_on_no_device() -> None:
    model = tiny_maps().to("meta")
    shapes = shapes_of_sites(model, taps_of(model), example=torch.zeros(1, 3, 11, 13), device="meta")
    assert shapes["around"] == PatchShape(tokens=9, groups=1, channels=12, chosen=None, taps=4, outputs=6)
