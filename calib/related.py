"""Images that belong together: crops of one photograph, frames of one film, copies saved again.

Names count that differ only in a word for a part and its number: `a_crop3.png`, `clip2/frame_0001.jpg`, `scan (2).png`.
Where names show nothing, the images of local folders and arrays are compared by perceptual hashes: those of a few runs
of neighbours first, and all only if some of these look alike.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .fingerprints import Fingerprints, first_alike, no_hashes, no_ids, perceptual_hashes
from .groups import merged_labels
from .images import Images
from .inputs import InputSet
from .sources import Array, Folder

SHOWN = 0.1
"""The least share of images with a relative at which groups are kept."""
LEAST_GROUPS = 8
RUNS, RUN = 8, 16  # runs of neighbours that are compared first, and the images in one
MOST = 20_000  # images that are compared with one another
_BATCH = 64
_PART = r"(?:aug|augmented|copy|crop|frame|part|patch|slice|tile|view)s?"
_NAME = re.compile(rf"(.*?)(?:(?:^|(?<=/)|[ _.-]+){_PART}(?:[ _.x-]*\d+)*|[ _-]*\(\d+\))\Z", re.IGNORECASE | re.DOTALL)


def whole_of_name(name: str) -> str:
    """Return the part of a file's name that all parts of one picture share, the name without suffix if none is named.

    Args:
        name: a path with slashes, relative to the images' folder.
    """
    stem = posixpath.splitext(name)[0]
    return match[1] if (match := _NAME.match(stem)) else stem


def shows_groups(labels: Sequence[object]) -> bool:
    """Check that enough labels are shared, by enough groups, of which none has more than half of the images."""
    sizes = Counter(labels)
    return shows_relatives(labels) and len(sizes) >= LEAST_GROUPS and 2 * max(sizes.values()) <= len(labels)


def shows_relatives(labels: Sequence[object]) -> bool:
    """Check that enough of the labels are shared."""
    return sum(size for size in Counter(labels).values() if size > 1) >= SHOWN * len(labels)


def _labels_by_look(images: Images) -> list[int]:
    """Return the smallest content id of the images that look alike, for each image; unreadable ones stand alone."""
    ids, hashes = [no_ids()], [no_hashes()]
    for batch in images.read(_BATCH):
        if len(batch.ids):
            ids.append(batch.ids)
            hashes.append(perceptual_hashes(batch.inputs))
    joined = _joined(Fingerprints(ids=torch.cat(ids), hashes_M2=torch.cat(hashes)))
    return [joined.get(each, each) for each in images.ids.tolist()]


def _joined(images: Fingerprints) -> dict[int, int]:
    """Return, by content id, the smallest id of the images that look alike."""
    first_N = first_alike(images.hashes_M2)
    least_N = images.ids.scatter_reduce(0, first_N, images.ids, "amin")
    return dict(zip(images.ids.tolist(), least_N[first_N].tolist(), strict=True))


def count_pictures(images: Fingerprints) -> int:
    """Count different pictures: images that look alike count as one, up to MOST images, and copies in any case."""
    joined = _joined(images) if len(images.hashes_M2) == len(images) <= MOST else {}
    return len({joined.get(each, each) for each in images.ids.tolist()})


def _neighbours(count: int) -> list[int]:
    """Return the positions of RUNS runs of RUN neighbours, or all if there are no more."""
    if count <= RUNS * RUN:
        return list(range(count))
    return [run * (count - RUN) // (RUNS - 1) + place for run in range(RUNS) for place in range(RUN)]


def find_related(inputs: InputSet) -> tuple[Tensor, str] | None:
    """Find which images belong together.

    Returns:
        The group of each image, int64 [count], named by the smallest content id in it, and how the groups were found:
        `names` or `near-duplicates`. None where nothing shows groups, and for inputs other than stored images.
    """
    if not isinstance(inputs, Images) or inputs.count < 2 * LEAST_GROUPS:
        return None
    by_name = [whole_of_name(inputs.name(position)) for position in range(inputs.count)]
    if not isinstance(inputs.source, Array) and shows_groups(by_name):
        first = dict[str, int]()
        for name, own in sorted(zip(by_name, inputs.ids.tolist(), strict=True), key=lambda each: each[1]):
            first.setdefault(name, own)
        labels = merged_labels([first[name] for name in by_name], inputs.ids.tolist())
        return torch.tensor(labels, dtype=torch.int64), "names"
    is_local = isinstance(inputs.source, Folder) or (
        isinstance(inputs.source, Array) and isinstance(inputs.source.path, Path)
    )
    if not is_local or inputs.count > MOST:
        return None
    if not shows_relatives(_labels_by_look(inputs.subset(_neighbours(inputs.count)))):
        return None
    by_look = _labels_by_look(inputs)
    return (torch.tensor(by_look, dtype=torch.int64), "near-duplicates") if shows_groups(by_look) else None
