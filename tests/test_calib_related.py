"""calib.related: images that belong together are found by names or looks, and otherwise not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calib.fingerprints import ALIKE, Fingerprints, are_alike, first_alike, perceptual_hashes
from calib.images import Images, open_images
from calib.related import LEAST_GROUPS, RUN, RUNS, count_pictures, find_related, shows_groups, whole_of_name
from calib.splits import split_for_calibration
from ground.errors import BadInput
from tests.doubles import some

SIDE = 16


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("harbour_crop3.png", "harbour"),
        ("harbour-crop-3.png", "harbour"),
        ("harbour.Crop 12.jpg", "harbour"),
        ("clip2/frame_0001.jpg", "clip2/"),
        ("clip2/frames_0001.jpg", "clip2/"),
        ("slide_tile_3_14.png", "slide"),
        ("slide tile 3x14.png", "slide"),
        ("scan (2).png", "scan"),
        ("scan copy.png", "scan"),
        ("a.tar/boat_view2.jpg", "a.tar/boat"),
        ("n01440764_10026.JPEG", "n01440764_10026"),
        ("ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000001"),
        ("overview.png", "overview"),
        ("airscrew.png", "airscrew"),
        ("cat/0001.png", "cat/0001"),
        ("IMG_2031.jpg", "IMG_2031"),
    ],
)
def test_whole_of_a_name_lacks_the_part(name: str, whole: str) -> None:
    assert whole_of_name(name) == whole


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([2] * 8, True),
        ([1] * 18 + [2], True),
        ([1] * 19 + [2], False),
        ([2] * (LEAST_GROUPS - 1), False),
        ([8, *[1] * 8], True),
        ([9, *[1] * 8], False),
        ([1] * 40, False),
    ],
)
def test_groups_show_if_a_tenth_is_related_and_none_is_half(sizes: list[int], shown: bool) -> None:
    assert shows_groups([group for group, size in enumerate(sizes) for _ in range(size)]) is shown


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """Return smooth pictures [count,3,SIDE,SIDE], as perceptual hashes see those of photographs."""
    coarse = torch.from_numpy(np.random.default_rng(seed).standard_normal((count, 3, SIDE, SIDE))).float()
    return coarse.numpy()


def array_of(path: Path, images: np.ndarray) -> Images:
    np.save(path, images.astype(np.float32))
    return open_images(path, image_shape=(3, SIDE, SIDE), transform=lambda _: torch.zeros(3, SIDE, SIDE))


def folder_of(root: Path, names: list[str], images: np.ndarray) -> Images:
    for name, image in zip(names, images, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(128 + 40 * image.transpose(1, 2, 0), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / name)

    def transform(picture: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(picture, np.float32) / 255.0).permute(2, 0, 1)

    return open_images(root, image_shape=(3, SIDE, SIDE), transform=transform)


def partition(groups_B: torch.Tensor) -> set[frozenset[int]]:
    every = groups_B.tolist()
    return {frozenset(place for place, group in enumerate(every) if group == each) for each in every}


def test_crops_in_a_folder_are_grouped_by_name(tmp_path: Path) -> None:
    names = [f"photo{number}_crop{crop}.png" for number in range(9) for crop in range(2)]
    images = folder_of(tmp_path, names, pictures(18))
    groups_B, by = some(find_related(images))
    assert by == "names"
    expected = {frozenset(each for each in range(18) if images.name(each).startswith(f"photo{n}_")) for n in range(9)}
    assert partition(groups_B) == expected
    assert all(int(groups_B[min(group)]) in images.ids[list(group)].tolist() for group in expected)


@pytest.mark.parametrize("count", [24, 300])
def test_near_duplicates_in_an_array_are_grouped(count: int, tmp_path: Path) -> None:
    """Compare neighbours alone first where there are more than 128 images."""
    images = pictures(count)
    images[1::4] = images[::4] * 1.02 + 0.001 * pictures(len(images[1::4]), seed=1)
    groups_B, by = some(find_related(array_of(tmp_path / "images.npy", images)))
    assert by == "near-duplicates"
    assert partition(groups_B) == {
        group
        for first in range(0, count, 4)
        for group in (frozenset({first, first + 1}), frozenset({first + 2}), frozenset({first + 3}))
    }


def test_a_still_film_takes_little_memory_and_time() -> None:
    """Count 4,000 frames that all look alike as one picture: they have eight million pairs."""
    frames = torch.zeros(4000, 2, dtype=torch.int64)
    frames[:, 0] = torch.arange(4000) % 4
    hashes = torch.cat([frames, torch.full((1, 2), -1)])
    assert first_alike(hashes).tolist() == [0] * 4000 + [4000]
    assert count_pictures(Fingerprints(ids=torch.arange(4001), hashes_M2=hashes)) == 2


@pytest.mark.parametrize("count", [0, 1, 60])
def test_first_alike_equals_explicit_search(count: int) -> None:
    random = torch.Generator().manual_seed(0)
    hashes = torch.randint(-(2**62), 2**62, (count, 2), generator=random)
    for place in range(1, count, 3):  # a chain: each third hash differs from an earlier one by three bits
        hashes[place] = hashes[max(place - 3, 0)]
        hashes[place, 1] ^= 0b111 << (place % 60)
    bits = [format(one % 2**64, "064b") + format(other % 2**64, "064b") for one, other in hashes.tolist()]
    expected = list(range(count))
    changed = True
    while changed:
        changed = False
        for one in range(count):
            for other in range(count):
                near = sum(a != b for a, b in zip(bits[one], bits[other], strict=True)) <= ALIKE
                if near and expected[other] < expected[one]:
                    expected[one], changed = expected[other], True
    assert first_alike(hashes).tolist() == expected
    assert count < 2 or len(set(expected)) < count


def test_a_film_is_one_group(tmp_path: Path) -> None:
    """Each frame is like its neighbours, and the first is not like the last."""
    images = pictures(80)
    steps = np.linspace(0.0, 0.5, 40)[:, None, None, None]
    images[:40] = (1.0 - steps) * images[0] + steps * images[79]
    hashes = perceptual_hashes(torch.from_numpy(images[[0, 39]]))
    assert not bool(are_alike(hashes[:1], hashes[1:]))
    groups_B, _ = some(find_related(array_of(tmp_path / "images.npy", images)))
    assert frozenset(range(40)) in partition(groups_B)


@pytest.mark.parametrize("count", [12, 40, RUNS * RUN + 30])
def test_different_images_have_no_groups(count: int, tmp_path: Path) -> None:
    assert find_related(array_of(tmp_path / "images.npy", pictures(count))) is None
    names = [f"cat/{number:04}.png" for number in range(count)]
    assert find_related(folder_of(tmp_path / "folder", names, pictures(count))) is None


def test_unreadable_images_stand_alone(tmp_path: Path) -> None:
    names = [f"{number:02}.png" for number in range(20)]
    images = pictures(20)
    images[1::2] = images[::2]
    opened = folder_of(tmp_path, names, images)
    (tmp_path / "03.png").write_bytes(b"no picture")
    damaged = replace(opened, max_bad=1)
    groups_B, _ = some(find_related(damaged))
    assert frozenset({2, 3}) not in partition(groups_B)
    assert frozenset({4, 5}) in partition(groups_B)


def test_split_finds_groups_unless_told_otherwise(tmp_path: Path) -> None:
    images = pictures(32)
    images[1::2] = images[::2] * 1.01
    opened = array_of(tmp_path / "images.npy", images)
    found = split_for_calibration(opened, hold_out=None, groups=None, seed=0)
    assert found.found_by == "near-duplicates"
    plain = split_for_calibration(opened, hold_out=None, groups="none", seed=0)
    assert (plain.groups_B, plain.found_by) == (None, "")
    apart = split_for_calibration(opened, hold_out=5, groups=None, seed=0)
    held_out = {place // 2 for place in some(apart.held_out).places}
    assert len(held_out) == 3, "whole groups, so one image more"
    assert held_out.isdisjoint(place // 2 for place in apart.fitted.places)
    single = split_for_calibration(opened, hold_out=5, groups="none", seed=0)
    assert some(single.held_out).count == 5
    nearly_all = split_for_calibration(opened, hold_out=31, groups=None, seed=0)
    assert (some(nearly_all.held_out).count, nearly_all.groups_B) == (31, None)
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps([number // 8 for number in range(32)]))
    given = split_for_calibration(opened, hold_out=None, groups=str(labels), seed=0)
    assert (len(partition(some(given.groups_B))), given.found_by) == (4, "")
    with pytest.raises(BadInput, match="hold out: got 32 of 32"):
        split_for_calibration(opened, hold_out=32, groups=None, seed=0)
