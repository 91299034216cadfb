"""Versions of packaged models: listing them, serving another one, and staging new ones beside the repository."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ground.errors import BadInput
from ground.files import replacing, text_from_file
from ground.transaction import exclusive_access, replacing_files, roll_back_interrupted


@contextmanager
def staging_folder(repository: Path) -> Iterator[Path]:
    """Make a temporary folder on the repository's file system, so that its content moves in by a rename.

    It lies beside the repository or, where that is another file system or not writable, hidden inside.
    """
    beside = repository.resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    inside = repository.is_dir() and not (_is_one_disk(beside, repository) and os.access(beside, os.W_OK))
    with tempfile.TemporaryDirectory(prefix=".staged-", dir=repository if inside else beside) as folder:
        yield Path(folder)


def _is_one_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


SUFFIXES = ("", "_onnx", "_cpu", "_aoti")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The version that `models` serve now; `unchanged` models lack it."""

    version: int
    models: tuple[str, ...]
    unchanged: tuple[str, ...]


def require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"model name {name[:100]!r}: use up to 100 letters, digits, '_', '.' and '-', a letter or digit first"
        )


def model_names(repository: Path, name: str) -> tuple[str, ...]:
    return tuple(name + suffix for suffix in SUFFIXES if (repository / (name + suffix)).is_dir())


def versions_of(model: Path) -> tuple[int, ...]:
    names = [entry.name for entry in model.iterdir() if entry.is_dir()]
    return tuple(sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]{0,18}", name)))


def config_path(model: Path, version: int) -> Path:
    return model / "configs" / f"{version}.pbtxt"


def switch_version(repository: Path, name: str, version: int) -> ServedVersion:
    """Set the configs of all variants that have this version to serve it alone. Raises BadInput if none has it."""
    roll_back_interrupted(repository)
    having, unchanged = models_by_version(repository, name, version)
    configs = [f"{each}/config.pbtxt" for each in having]
    with exclusive_access(repository.resolve().parent), replacing_files(repository, configs) as written:
        for each, config in zip(having, written, strict=True):
            config.write_text(text_from_file(config_path(repository / each, version)))
    return ServedVersion(version=version, models=having, unchanged=unchanged)


def models_by_version(repository: Path, name: str, version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the variants that have a version, and those that lack it. Raises BadInput when none has it."""
    require_name(name)
    names = tuple(each for each in model_names(repository, name) if versions_of(repository / each))
    if not names:
        raise BadInput(f"{repository}: there is no model {name!r} with a version in it")
    having = tuple(each for each in names if config_path(repository / each, version).is_file())
    bare = next((each for each in having if version not in versions_of(repository / each)), None)
    if bare is not None:
        raise BadInput(f"{repository / bare / str(version)}: gone, though there is a config of it; package it again")
    if not having:
        have = sorted({number for each in names for number in versions_of(repository / each)})
        raise BadInput(f"{repository}: {name} has no version {version}, only {', '.join(map(str, have)) or 'none'}")
    return having, tuple(each for each in names if each not in having)


def install_text(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(text)
