"""Groups of similar inputs (crops of one photograph, frames of one film), and splits that keep groups together."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ground.arrays import array_from_npy
from ground.errors import BadInput
from ground.records import record_from_file

from .inputs import InputSet, SomeSet, split_by_mask

_FILE = re.compile(r".+(?= row [0-9]+\Z)|.+?\.(tar(\.[a-z0-9]+)?|tgz|tbz2|txz)/")
"""The file in the name of a row of a table, or of a member of a tar shard."""
BY_NAME = ("image", "folder", "file")
UNGROUPED = "none"
"""The value of `groups` for which no groups are looked for (see calib.splits)."""
LABELS = (".json", ".npy")
NAMES_OF_LABELS = " or ".join(LABELS)


def _labels_from_file(path: Path) -> list[str]:
    remedy = "expected a list of texts or whole numbers, one label an input"
    if not path.exists():
        raise BadInput(f"{path}: no such file, expected labels of groups ({NAMES_OF_LABELS})")
    if path.suffix == ".json":
        return [str(each) for each in record_from_file(path, list[str | int], remedy=remedy)]
    labels = array_from_npy(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise BadInput(f"{path}: got {labels.dtype} {list(labels.shape)}; {remedy}")
    if labels.dtype.kind == "U" and not _are_unicode(labels):
        raise BadInput(f"{path}: a label holds values that are no Unicode characters; {remedy}")
    return [str(each) for each in labels.tolist()]


def _are_unicode(texts: NDArray[np.str_]) -> bool:
    """Return whether all characters are Unicode scalars; NumPy accepts any four bytes as a character."""
    if not texts.dtype.itemsize:
        return True
    codes = np.ascontiguousarray(texts).view(np.dtype("u4").newbyteorder(texts.dtype.byteorder))
    return bool(((codes <= 0x10FFFF) & ((codes < 0xD800) | (codes > 0xDFFF))).all())


def _labels_of_inputs(inputs: InputSet, by: str) -> list[str]:
    names = [inputs.name(position) for position in range(inputs.count)]
    if by == "image":
        return names
    if by == "file":
        return [match[0] if (match := _FILE.match(name)) else name for name in names]
    if by == "folder":
        folders = [name.rpartition("/")[0] for name in names]
        if not any(folders):
            raise BadInput(
                f"groups: the {inputs.noun} are in no folders; give a file with a label for each ({NAMES_OF_LABELS})"
            )
        return folders
    if Path(by).suffix not in LABELS:
        raise BadInput(
            f"groups: got {by!r}, expected {', '.join(BY_NAME)}, or a file with one label an input ({NAMES_OF_LABELS})"
        )
    labels = _labels_from_file(Path(by))
    if len(labels) != inputs.available:
        raise BadInput(f"{by}: {len(labels)} labels for {inputs.available} {inputs.noun}; give one label for each")
    return [labels[place] for place in inputs.places]


def merged_labels(labels: Iterable[int], ids: Iterable[int]) -> list[int]:
    """Return the labels, with those that share an id, also transitively, replaced by the smallest of them."""
    labels, parent = list(labels), dict[int, int]()

    def root(label: int) -> int:
        while (above := parent.setdefault(label, label)) != label:
            parent[label] = parent[above]
            label = above
        return label

    first: dict[int, int] = {}
    for label, content in zip(labels, ids, strict=True):
        one, other = sorted((root(label), root(first.setdefault(content, label))))
        parent[other] = one
    return [root(label) for label in labels]


def group_ids(inputs: InputSet, by: str) -> Tensor:
    """Return each input's group, int64 [count], by `image`, `folder`, `file` (a tar shard is one) or a label file.

    Copies of an input are in one group; groups that share an input are joined. Raises BadInput where the inputs have
    no such groups.
    """
    digests = (hashlib.sha256(label.encode()).digest()[:8] for label in _labels_of_inputs(inputs, by))
    labels = (int.from_bytes(digest, "little", signed=True) for digest in digests)
    return torch.tensor(merged_labels(labels, inputs.ids.tolist()), dtype=torch.int64)


def second_half_mask(groups_B: Tensor, *, seed: int, noun: str = "inputs") -> Tensor:
    """Return the mask of inputs in the second half, bool [count]: each group goes to the half that is smaller.

    Raises BadInput for fewer than two groups.
    """
    groups, sizes = groups_B.unique(return_counts=True)
    if len(groups) < 2:
        raise BadInput(f"groups: all {len(groups_B)} {noun} are of one group, expected two groups or more")
    drawn = np.random.default_rng(seed).permutation(list(zip(groups.tolist(), sizes.tolist(), strict=True)))
    counts, second = [0, 0], list[int]()
    for group, size in sorted(drawn.tolist(), key=lambda each: -each[1]):  # larger groups first, equal ones as drawn
        side = int(counts[1] < counts[0])
        counts[side] += size
        if side:
            second.append(group)
    return torch.isin(groups_B, torch.tensor(second, dtype=torch.int64))


def held_out_groups(inputs: SomeSet, groups_B: Tensor, count: int, *, seed: int) -> tuple[SomeSet, SomeSet, Tensor]:
    """Hold out groups drawn by `seed` until they have `count` inputs.

    Returns the inputs that stay, the held-out inputs, and the groups of those that stay. Raises BadInput unless both
    parts have an input.
    """
    groups, sizes = groups_B.unique(return_counts=True)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(groups)))
    before = sizes[order].cumsum(0) - sizes[order]
    is_held_out = torch.isin(groups_B, groups[order[before < count]])
    if bool(is_held_out.all()) or not bool(is_held_out.any()):
        raise BadInput(
            f"hold out: got {count} of {inputs.count} {inputs.noun} in {len(groups)} groups, expected at least 1, and "
            "at least one group that is not held out"
        )
    return (*split_by_mask(inputs, is_held_out), groups_B[~is_held_out])
