"""Where models are made before they are moved into a repository, whole, by one rename."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staging_folder(repository: Path) -> Iterator[Path]:
    """A folder of this process alone, gone afterwards: beside the repository, or hidden inside where that is a file
    system of its own, such as a container's volume, or nothing may be written beside it.
    """
    beside = repository.resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    inside = repository.is_dir() and not (_is_one_disk(beside, repository) and os.access(beside, os.W_OK))
    with tempfile.TemporaryDirectory(prefix=".staged-", dir=repository if inside else beside) as folder:
        yield Path(folder)


def _is_one_disk(one: Path, other: Path) -> bool:
    """A rename never leaves a file system."""
    return one.stat().st_dev == other.stat().st_dev
