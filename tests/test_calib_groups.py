"""calib.groups: halves and held-out sets keep groups whole; moments of halves are saved, merged and refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from calib.combination import merge_moments, subtract_statistics
from calib.fingerprints import Fingerprints
from calib.groups import group_ids, held_out_groups, merged_labels, second_half_mask
from calib.images import Images, open_images
from calib.moments import ChannelMoments, Moments, SiteMoments
from calib.store import load_moments, save_moments
from tests.doubles import some
from tests.refusals import rejects
from tests.sums import assert_equal


def array(path: Path, images: np.ndarray, **options: Any) -> Images:
    np.save(path, images)
    return opened(path, **options)


def opened(path: Path, **options: Any) -> Images:
    return open_images(path, image_shape=(3, 4, 4), transform=lambda _: torch.zeros(3, 4, 4), **options)


def random_images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 4, 4)).astype(np.float32)


def labelled(folder: Path, labels: list[str] | list[int]) -> str:
    path = folder / "labels.json"
    path.write_text(json.dumps(labels))
    return str(path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(1, 1), (5, 1), (1, 2, 3, 4), (7, 7, 7), tuple([3] * 37), (40, 1, 1, 1)])
def test_halves_split_no_group(sizes: tuple[int, ...], seed: int) -> None:
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])
    groups = groups[torch.from_numpy(np.random.default_rng(seed).permutation(len(groups)))]
    second = second_half_mask(groups, seed=seed)
    assert not set(groups[second].tolist()) & set(groups[~second].tolist())
    counts = sorted((int(second.sum()), int((~second).sum())))
    assert counts[0] >= 1
    assert counts[1] - counts[0] <= max(sizes)
    assert torch.equal(second, second_half_mask(groups, seed=seed))


def test_one_group_has_no_halves() -> None:
    rejects("all 5 images are of one group", second_half_mask, torch.zeros(5, dtype=torch.int64), seed=0, noun="images")


def test_groups_that_share_an_image_are_joined() -> None:
    """The expected groups are the transitive closure of sharing a label or an identifier."""
    draw = np.random.default_rng(3)
    labels, ids = draw.integers(0, 12, 30).tolist(), draw.integers(0, 22, 30).tolist()
    reached = np.array([[a == c or b == d for c, d in zip(labels, ids, strict=True)]
                        for a, b in zip(labels, ids, strict=True)])  # fmt: skip
    for _ in range(30):
        reached = (reached.astype(int) @ reached.astype(int)) > 0
    got = merged_labels(labels, ids)
    assert [[a == b for b in got] for a in got] == reached.tolist()


def test_group_labels_follow_the_sampled_images(tmp_path: Path) -> None:
    drawn = array(tmp_path / "images.npy", random_images(10), samples=6, seed=1)
    labels = [f"photograph {number // 3}" for number in range(10)]
    got = group_ids(drawn, labelled(tmp_path, labels)).tolist()
    expected = [labels[place] for place in drawn.places]
    assert [[a == b for b in got] for a in got] == [[a == b for b in expected] for a in expected]
    np.save(tmp_path / "labels.npy", np.array([number // 3 for number in range(10)]))
    numbers = group_ids(drawn, str(tmp_path / "labels.npy")).tolist()
    assert [[a == b for b in numbers] for a in numbers] == [[a == b for b in got] for a in got]


def test_folders_become_groups(tmp_path: Path) -> None:
    for number, name in enumerate(("a/1.png", "a/2.png", "b/1.png", "top.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 40 * number, dtype=np.uint8)).save(tmp_path / name)
    images = opened(tmp_path)
    a1, a2, b1, top = group_ids(images, "folder").tolist()
    assert a1 == a2
    assert len({a1, b1, top}) == 3
    assert len(group_ids(images, "image").unique()) == len(group_ids(images, "file").unique()) == 4


def test_mismatched_group_labels_are_refused(tmp_path: Path) -> None:
    images = array(tmp_path / "images.npy", random_images(4))
    rejects("3 labels for 4 images; give one label for each", group_ids, images, labelled(tmp_path, [1, 2, 3]))
    rejects("are in no folders", group_ids, images, "folder")
    rejects("expected image, folder, file, or a file", group_ids, images, "photograph")
    rejects("no such file", group_ids, images, str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    rejects(r"bad\.json: .* expected a list", group_ids, images, str(tmp_path / "bad.json"))
    (tmp_path / "odd.json").write_text('{"a": 1}')
    rejects("expected a list of texts or whole numbers", group_ids, images, str(tmp_path / "odd.json"))


def test_held_out_split_keeps_groups_whole(tmp_path: Path) -> None:
    images = array(tmp_path / "images.npy", random_images(20))
    groups = group_ids(images, labelled(tmp_path, [number // 4 for number in range(20)]))
    rest, held, left = held_out_groups(images, groups, 5, seed=0)
    assert (rest.count, held.count) == (12, 8)
    assert Counter(left.tolist()).most_common()[0][1] == 4
    assert not set(rest.ids.tolist()) & set(held.ids.tolist())
    rejects("hold out: got 17 of 20 images in 5 groups", held_out_groups, images, groups, 17, seed=0)


def channels(seed: int) -> ChannelMoments:
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return ChannelMoments(tokens=9, eps=0.01, sum_F=x.sum(0), gram_FF=x.T @ x, active_F=torch.ones(4).double())


def halved(first: int) -> Moments:
    """Make moments of four images in two groups, whose second half is the second group."""

    def moments_of_images(numbers: range) -> Moments:
        fingerprints = Fingerprints(ids=torch.tensor(numbers))
        sites: dict[str, SiteMoments] = {"mlp": merge_of(*numbers)}
        return Moments(sites=sites, lineage={"model": "m"}, images=len(numbers), fingerprints=fingerprints)

    groups = torch.tensor([first, first, first + 2, first + 2])
    whole, half = (moments_of_images(range(start, first + 4)) for start in (first, first + 2))
    return replace(whole, group_ids=groups, half=half)


def test_moments_file_contains_both_halves(tmp_path: Path) -> None:
    whole = halved(0)
    save_moments(whole, tmp_path / "moments.safetensors")
    got = load_moments(tmp_path / "moments.safetensors")
    assert torch.equal(got.group_ids, whole.group_ids)
    assert_equal(got, whole, 0.0)
    assert_equal(some(got.half), some(whole.half), 0.0)
    save_moments(got, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "moments.safetensors").read_bytes()
    require_same(subtract_statistics(got.sites["mlp"], some(got.half).sites["mlp"]), merge_of(0, 1))


def require_same(got: SiteMoments, expected: ChannelMoments) -> None:
    one, other = (Moments(sites={"mlp": each}, lineage={}, images=1) for each in (got, expected))
    assert_equal(one, other, 1e-12)


def merge_of(*numbers: int) -> ChannelMoments:
    every = [channels(number) for number in numbers]
    sums: dict[str, Any] = {
        name: sum(getattr(each, name) for each in every) for name in ("sum_F", "gram_FF", "active_F")
    }
    return ChannelMoments(tokens=sum(each.tokens for each in every), eps=0.01, **sums)


def test_halves_merge_by_addition() -> None:
    both = merge_moments(halved(0), halved(10))
    assert some(both.half).images == 4
    require_same(some(both.half).sites["mlp"], merge_of(2, 3, 12, 13))
    require_same(both.sites["mlp"], merge_of(0, 1, 2, 3, 10, 11, 12, 13))
    assert both.group_ids.tolist() == [0, 0, 2, 2, 10, 10, 12, 12]


def test_groups_held_out_in_only_one_part_are_refused() -> None:
    one, other = halved(0), halved(10)
    crossed = replace(other, group_ids=torch.tensor([2, 2, 12, 12]))
    rejects("1 groups of the same name are in both", merge_moments, one, crossed)


def test_moments_with_and_without_groups_merge_without_them() -> None:
    one, other = halved(0), halved(10)
    both = merge_moments(one, replace(other, half=None, group_ids=torch.empty(0, dtype=torch.int64)))
    assert both.half is None
    assert len(both.group_ids) == 0
    named = merge_moments(one, replace(other, half=None))
    assert (named.half, named.group_ids.tolist()) == (None, [0, 0, 2, 2, 10, 10, 12, 12])
    require_same(named.sites["mlp"], merge_of(0, 1, 2, 3, 10, 11, 12, 13))
    require_same(both.sites["mlp"], merge_of(0, 1, 2, 3, 10, 11, 12, 13))


def test_half_that_splits_a_group_is_refused() -> None:
    whole = halved(0)
    rejects("a group is in both halves", replace, whole, group_ids=torch.tensor([0, 1, 1, 2]))
