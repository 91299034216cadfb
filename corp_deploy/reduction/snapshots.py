"""Moments of parts of the images: of a two-fold split by groups, and of the first images.

A fit to either half of the split is judged on the other. Moments of the first images, at several numbers of them, are
written by the pass over all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.calibrate import Snapshots, refuse_counts
from calib.combination import merge_moments
from calib.distributed import Ranks
from calib.groups import second_half_mask
from calib.inputs import InputSet, split_by_mask
from calib.moments import Moments
from calib.store import load_moments, save_moments
from ground.errors import BadInput

from .moments import summary_of_moments

SUMS_HELD = 3  # times what one pass takes: both halves, and their sum


def join_splits(images: InputSet, groups_B: Tensor, first: Moments, second: Moments) -> Moments:
    """Return the moments of all images, given those of both halves."""
    merged = merge_moments(first, second)
    groups = groups_of_moments(merged, images, groups_B)
    return replace(merged, lineage={**merged.lineage, "images": images.digest}, group_ids=groups, half=second)


def groups_of_moments(moments: Moments, images: InputSet, groups_B: Tensor) -> Tensor:
    """Return the groups of the moments' images, in their order, given those of `images`."""
    group_of = dict(zip(images.ids.tolist(), groups_B.tolist(), strict=True))
    return torch.tensor([group_of[each] for each in moments.image_ids.tolist()], dtype=torch.int64)


def moments_in_splits(
    images: InputSet, groups_B: Tensor, take: Callable[[InputSet, int], Moments], *, seed: int
) -> Moments:
    """Return the moments of all images with those of one half; `take` receives a half and its number, 0 or 1.

    Raises:
        BadInput: all images are of one group.
    """
    second_B = second_half_mask(groups_B, seed=seed, noun=images.noun)
    first, second = (take(half, number) for number, half in enumerate(split_by_mask(images, second_B)))
    return join_splits(images, groups_B, first, second)


def refuse_snapshots(counts: tuple[int, ...], images: InputSet, ranks: Ranks) -> None:
    """Raise BadInput for counts that don't ascend or exceed the fitted images, and for several processes.

    With several processes none reads the first images of all.
    """
    if not counts:
        return
    refuse_counts(counts)
    if ranks.size > 1:
        raise BadInput(
            f"--snapshots: each of the {ranks.size} processes has a consecutive share of the {images.noun}, so none "
            "has the first ones of all; calibrate with one process, without torchrun"
        )
    if counts[-1] > images.count:
        raise BadInput(
            f"--snapshots {counts[-1]}: expected at most {images.count}, the {images.noun} that are fitted to (without "
            "those held out)"
        )


def _written(counts: Sequence[int], path: Callable[[int], Path]) -> Snapshots:
    """Return snapshots after these numbers of images, each saved to `path(count)`."""
    return Snapshots(
        counts=tuple(counts),
        write=lambda count, moments: save_moments(moments, path(count)),
        written=lambda count: path(count).is_file(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFiles:
    """The files beside `output` with the moments of the first images, `counts` of them, ascending."""

    output: Path
    counts: tuple[int, ...]

    def _path(self, count: int) -> Path:
        return self.output.with_name(f"{self.output.stem}.{count}{self.output.suffix}")

    def _unfinished(self, count: int) -> Path:
        """Return the path of the first half's part of a snapshot; `count` is the number of images in that part."""
        return self.output.with_name(f"{self.output.stem}.{count}.half1.partial.safetensors")

    def of_pass(self) -> Snapshots | None:
        """Return the snapshots that one pass over all images writes."""
        return _written(self.counts, self._path) if self.counts else None

    def of_splits(self, images: InputSet, groups_B: Tensor, seed: int) -> tuple[Snapshots | None, Snapshots | None]:
        """Return the snapshots of the passes over both halves.

        The first pass saves its half of each snapshot, the second pass joins its own half to that. The first images are
        split into halves as all images are.

        Raises:
            BadInput: the first images are all of one half.
        """
        if not self.counts:
            return None, None
        second_B = second_half_mask(groups_B, seed=seed, noun=images.noun)
        parts = {count: int(second_B[:count].sum()) for count in self.counts}
        for count, of_second in parts.items():
            if of_second in (0, count):
                raise BadInput(
                    f"--snapshots {count}: the first {count} {images.noun} are all in one half of the groups, so "
                    "nothing would judge what is fitted to them; take more, or draw their order with --samples"
                )
        first = {count - parts[count] for count in parts}
        return _written(sorted(first), self._unfinished), self._second(images, groups_B, parts)

    def _second(self, images: InputSet, groups_B: Tensor, parts: Mapping[int, int]) -> Snapshots:
        def of(part: int) -> list[int]:
            return [count for count in self.counts if parts[count] == part]

        def write(part: int, second: Moments) -> None:
            for count in of(part):
                first, some = load_moments(self._unfinished(count - part)), images.subset(range(count))
                save_moments(join_splits(some, groups_B[:count], first, second), self._path(count))

        def written(part: int) -> bool:
            return all(self._path(count).is_file() for count in of(part))

        return Snapshots(counts=tuple(sorted(set(parts.values()))), write=write, written=written)

    def summaries(self) -> list[dict[str, Any]]:
        paths = [self._path(count) for count in self.counts]
        return [summary_of_moments(load_moments(path), path) for path in paths]

    def clear(self) -> None:
        """Remove the files that the first half left."""
        ours = re.compile(re.escape(self.output.stem) + r"\.\d+\.half1\.partial\.safetensors")
        for path in self.output.parent.iterdir() if self.counts else ():
            if ours.fullmatch(path.name):
                path.unlink()
