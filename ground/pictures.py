"""Search for pictures that Pillow can read below a folder, with counts of other files. Imports no torch.

Links are followed, and each real folder is read once. Hidden files and folders of operating systems, file servers and
notebooks (thumbnails, copies, waste) are never read.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import BadInput

# Formats that are not read: Pillow starts a program for them, they are films, or Pillow has only a stub.
_NEVER = {"BUFR", "EPS", "FLI", "GRIB", "HDF5", "MPEG", "WMF"}
_READ_AS = {"MPO": "JPEG"}
_SYSTEM = {"@eaDir", "__MACOSX", "lost+found", "#recycle", "$RECYCLE.BIN", "System Volume Information"}
_NAMED = 6


def picture_suffixes() -> Mapping[str, str]:
    """Return Pillow's format for each suffix of images that are read; formats that are never read are left out."""
    from PIL import Image

    formats = {suffix: _READ_AS.get(name, name) for suffix, name in Image.registered_extensions().items()}
    return {suffix: name for suffix, name in formats.items() if name in Image.OPEN and name not in _NEVER}


def formats_for(name: str) -> list[str]:
    """Return the Pillow formats to try on a file of this name: all that Pillow detects, and its suffix's."""
    from PIL import Image

    suffixed = picture_suffixes().get(_suffix(name))
    signed = [each for each, (_, accepts) in Image.OPEN.items() if accepts is not None and each not in _NEVER]
    return signed if suffixed is None or suffixed in signed else [*signed, suffixed]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is hidden or belongs to an operating system."""
    return name.startswith(".") or name in _SYSTEM


def is_shown(name: str) -> bool:
    """Return whether no part of a relative path is hidden."""
    return not any(is_hidden(part) for part in name.split("/") if part != ".")


@dataclass(slots=True)
class Skips:
    """Counts of files and folders that are left out, by reason, with their suffixes or names."""

    counts: Counter[str] = field(default_factory=Counter)
    named: dict[str, set[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        self.named.setdefault(reason, set()).add(name)

    @property
    def files(self) -> int:
        """The number of files left out, without those in folders that were not read."""
        return sum(count for reason, count in self.counts.items() if "file{s}" in reason)

    @property
    def line(self) -> str:
        """One line with a count for each reason, empty if nothing was left out."""
        return "; ".join(
            f"{count} {reason.format(s='s'[: count > 1])} ({_join_some(self.named[reason])})"
            for reason, count in self.counts.items()
        )


def _join_some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_NAMED]) + ", ..." * (len(ordered) > _NAMED)


HIDDEN_FILES, HIDDEN_FOLDERS = "hidden file{s}", "hidden or system folder{s}"
IN_HIDDEN, OTHERS = "file{s} in hidden or system folders", "file{s} of another kind"
UNREADABLE, AGAIN = "folder{s} that can't be read", "link{s} to folders that are read already"


def sample_key(name: str) -> str:
    """Return the path without suffixes, which the files of one sample share: 000.jpg and 000.cls in web datasets."""
    folder, slash, own = name.rpartition("/")
    return folder + slash + own.partition(".")[0]


def select_pictures(names: Iterable[str], skips: Skips) -> list[str]:
    """Return the names of pictures in order; count other files in `skips`, except those named like a picture."""
    suffixes, chosen, others = picture_suffixes(), [], []
    for name in names:
        *folders, own = (part for part in name.split("/") if part != ".")
        if hidden := next(filter(is_hidden, folders), None):
            skips.add(IN_HIDDEN, hidden)
        elif is_hidden(own):
            skips.add(HIDDEN_FILES, own)
        elif _suffix(own) in suffixes:
            chosen.append(name)
        else:
            others.append(name)
    keys = set(map(sample_key, chosen))
    for name in others:
        if sample_key(name) not in keys:
            skips.add(OTHERS, _suffix(name) or "no suffix")
    return chosen


def pictures_below(root: Path) -> tuple[tuple[str, ...], Skips]:
    """Return the sorted relative paths of the pictures below a folder, and counts of what was left out.

    Raises BadInput for a folder that can't be read.
    """
    skips = Skips()
    return tuple(select_pictures(names_below(root, skips), skips)), skips


def names_below(root: Path, skips: Skips) -> list[str]:
    """Return the sorted relative paths of the files below a folder; count the folders left out in `skips`.

    Raises BadInput for a folder that can't be read.
    """
    real_root = os.path.realpath(root)
    names, read = list[str](), set[str]()
    folders, links = [root], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)  # links last, so that a folder has its own path
        real = os.path.realpath(folder)
        if real in read or (folder != root and Path(real_root).is_relative_to(real)):
            skips.add(AGAIN, folder.name)
            continue
        read.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            if folder == root:
                raise BadInput(f"{root}: can't be read ({error.strerror})") from error
            skips.add(UNREADABLE, folder.name)
            continue
        for entry in entries:
            if not os.path.isdir(entry.path):
                names.append(Path(entry.path).relative_to(root).as_posix())
            elif is_hidden(entry.name):
                skips.add(HIDDEN_FOLDERS, entry.name)
            else:
                (links if entry.is_symlink() else folders).append(Path(entry.path))
    return sorted(names)
