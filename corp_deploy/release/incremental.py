"""Stages that are done when a stamp says so: the digest of all they read, and the digests of all they made.

A stage writes into an empty directory beside; its files are moved to their places one by one, the stamp last. So a
process that is killed at any moment leaves either a stage that stands or one that is made again. Imports no torch.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ground.errors import BadInput
from ground.files import regular, sha256_of_file, sha256_of_text, write_json

STATE = ".stages"
STAMP_KIND, CACHE_KIND = "corp-deploy/stamp", "corp-deploy/digests"
# A file that was written this recently may change again without its time of change moving.
SETTLED_NS = 2_000_000_000
_OS_ERROR = re.compile(r"os error (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDirs:
    """Where a stage works: the directory of results, an empty one to write into, and a name whose stem begins those of
    all that it leaves unfinished on purpose (kept for the next attempt with the same inputs).
    """

    root: Path
    into: Path
    unfinished: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step. `reads` and `makes` are files below the directory of results, or whole folders when a slash ends them.
    `outside` are files or folders elsewhere, by label. `settings` are JSON values. `lack` says why this machine can't
    do it (None: it can).
    """

    name: str
    makes: tuple[str, ...]
    does: Callable[[StageDirs], None]
    reads: tuple[str, ...] = ()
    outside: Mapping[str, Path] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    lack: Callable[[], str | None] = lambda: None
    command: str = ""

    def __post_init__(self) -> None:
        assert self.makes, self.name
        assert len(set(self.makes)) == len(self.makes), self.makes
        assert not set(self.makes) & set(self.reads), self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a finished stage had read (label to digest or setting) and what it made (file to sha256)."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


State = Literal["cached", "runs", "follows", "blocked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """What the next run will do with a stage, and why. `follows`: only if what it reads comes out different."""

    stage: str
    state: State
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run did: stages made, found as they were, and not possible here with the reason."""

    made: tuple[str, ...]
    cached: tuple[str, ...]
    blocked: Mapping[str, str]


class Digests:
    """Digests of files, remembered by size and time of change; of a folder, over names and files."""

    def __init__(self, state: Path) -> None:
        self._file = state / "digests.json"
        self._known: dict[str, list[Any]] = self._read()
        self._saved = dict(self._known)

    def _read(self) -> dict[str, list[Any]]:
        try:
            value = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return dict(value["files"]) if isinstance(value, dict) and value.get("kind") == CACHE_KIND else {}

    def save(self) -> None:
        """Write what is new; nothing when nothing is."""
        if self._known == self._saved and self._file.is_file():
            return
        self._saved = dict(self._known)
        write_json(self._file, {"kind": CACHE_KIND, "version": 1, "files": self._known})

    def of_file(self, path: Path) -> str:
        found = path.stat()
        key, mark = str(path.resolve()), [found.st_size, found.st_mtime_ns]
        known = self._known.get(key)
        if known is not None and known[:2] == mark:
            return str(known[2])
        digest = sha256_of_file(path)
        self._known.pop(key, None)
        if time.time_ns() - found.st_mtime_ns > SETTLED_NS:
            self._known[key] = [*mark, digest]
        return digest

    def of_path(self, path: Path) -> str:
        """A file, a folder (every file below it by name), or numbered shards such as x-{00..07}.tar."""
        if path.is_file():
            return self.of_file(path)
        files = files_of(path)
        if not files:
            raise BadInput(f"{path}: no such file or folder, or nothing in it; check the recipe")
        base = path if path.is_dir() else path.parent
        return sha256_of_text("".join(f"{self.of_file(each)} {each.relative_to(base).as_posix()}\n" for each in files))


def files_of(path: Path) -> list[Path]:
    """The files that a path of a recipe stands for, in a fixed order; none when there are none."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    if "{" in path.name and path.parent.is_dir():
        return sorted(path.parent.glob(re.sub(r"\{[^}]*\}", "*", path.name)))
    return []


def _stamp_path(root: Path, name: str) -> Path:
    return root / STATE / f"{name}.json"


def read_stamp(root: Path, name: str) -> Stamp | None:
    """The stage's stamp, or None when it never finished (or its stamp can't be read)."""
    try:
        value = json.loads(_stamp_path(root, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("kind") != STAMP_KIND or value.get("version") != 1:
        return None
    return Stamp(inputs=value["inputs"], outputs=value["outputs"])


def _write_stamp(root: Path, name: str, stamp: Stamp) -> None:
    content = {"kind": STAMP_KIND, "version": 1, "inputs": dict(stamp.inputs), "outputs": dict(stamp.outputs)}
    write_json(_stamp_path(root, name), content)


def _covered(name: str, makes: Sequence[str]) -> bool:
    return name in makes or any(make.endswith("/") and name.startswith(make) for make in makes)


def _complete(names: Set[str], makes: Sequence[str]) -> bool:
    """Whether these are files that a stage may make, and all single ones among them."""
    single = {make for make in makes if not make.endswith("/")}
    return single <= names and all(_covered(name, makes) for name in names)


def inputs_of(stage: Stage, root: Path, digests: Digests) -> dict[str, str]:
    """Everything that decides what the stage makes. Raises BadInput for a file that is not there."""
    missing = [name for name in stage.reads if not files_of(root / name)]
    if missing:
        raise BadInput(f"stage {stage.name}: {root / missing[0]} is not there; run the stage that makes it first")
    inputs = {key: json.dumps(value, sort_keys=True) for key, value in stage.settings.items()}
    inputs |= {name: digests.of_path(root / name) for name in stage.reads}
    return inputs | {label: digests.of_path(path) for label, path in stage.outside.items()}


def reason_to_run(stage: Stage, stamp: Stamp | None, inputs: Mapping[str, str], root: Path, digests: Digests) -> str:
    """Why a stage is not done, or nothing when it is."""
    if stamp is None:
        return "not done yet"
    changed = sorted(key for key in {*stamp.inputs, *inputs} if stamp.inputs.get(key) != inputs.get(key))
    if changed:
        return f"changed: {', '.join(changed[:4])}" + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
    if not _complete(stamp.outputs.keys(), stage.makes):
        return "it makes other files now"
    for name, digest in stamp.outputs.items():
        if not (root / name).is_file():
            return f"{name} is gone"
        if digests.of_file(root / name) != digest:
            return f"{name} was changed after it was made"
    return ""


def plan(stages: Sequence[Stage], root: Path) -> list[StageStatus]:
    """What a run would do now; writes nothing."""
    digests = Digests(root / STATE)
    found: list[StageStatus] = []
    open_files: dict[str, str] = {}
    blocked: dict[str, str] = {}
    for stage in stages:
        planned = _planned(stage, root, digests, open_files, blocked)
        found.append(planned)
        if planned.state == "blocked":
            blocked |= dict.fromkeys(stage.makes, stage.name)
        elif planned.state != "cached":
            open_files |= dict.fromkeys(stage.makes, stage.name)
    return found


def _planned(
    stage: Stage, root: Path, digests: Digests, open_files: Mapping[str, str], blocked: Mapping[str, str]
) -> StageStatus:
    waits = sorted({blocked[name] for name in stage.reads if name in blocked})
    if waits:
        return StageStatus(stage=stage.name, state="blocked", why=f"waits for {', '.join(waits)}")
    after = sorted({open_files[name] for name in stage.reads if name in open_files})
    stamp = read_stamp(root, stage.name)
    if after and stamp is not None:
        return StageStatus(stage=stage.name, state="follows", why=f"if {', '.join(after)} comes out different")
    why = "not done yet" if after else reason_to_run(stage, stamp, inputs_of(stage, root, digests), root, digests)
    if not why:
        return StageStatus(stage=stage.name, state="cached", why="nothing changed")
    lack = stage.lack()
    return StageStatus(stage=stage.name, state="runs" if lack is None else "blocked", why=why if lack is None else lack)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """The directory for this process alone; the kernel releases it when the process ends, however it ends.

    Raises BadInput when another process works there.
    """
    (root / STATE).mkdir(parents=True, exist_ok=True)
    with (root / STATE / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise BadInput(
                f"{root}: another release ({lock.read().strip() or 'unknown process'}) works in this directory; "
                "wait until it ends, or give another directory"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()}\n")
        lock.flush()
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _as_os_error(error: Exception, stage: Stage, root: Path) -> OSError | None:
    """A full disk as one error, also where a library words it in its own way."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        worded = _OS_ERROR.search(str(error))
        number = int(worded[1]) if worded else None
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return OSError(number, os.strerror(number), f"{root} (stage {stage.name})")


def _move(stage: Stage, root: Path, into: Path) -> dict[str, str]:
    """The made files to their places; returns their digests."""
    made = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    if not _complete(made, stage.makes):
        raise RuntimeError(f"stage {stage.name} was to make {sorted(stage.makes)}, but made {sorted(made)}")
    outputs = {}
    for name in sorted(made):
        _sync(into / name)
        outputs[name] = sha256_of_file(into / name)
    for name in outputs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).chmod(0o644)
        (into / name).replace(regular(root / name))
    for folder in {(root / name).parent for name in outputs}:
        _sync(folder)
    return outputs


def _make(stage: Stage, root: Path, inputs: Mapping[str, str]) -> None:
    state = root / STATE
    into = state / "work"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    key = sha256_of_text(json.dumps(inputs, sort_keys=True))[:16]
    unfinished = state / f"unfinished-{stage.name}-{key}.safetensors"
    for stale in state.glob(f"unfinished-{stage.name}-*"):
        if not stale.name.startswith(unfinished.stem):
            stale.unlink()
    before = read_stamp(root, stage.name)
    try:
        stage.does(StageDirs(root=root, into=into, unfinished=unfinished))
        outputs = _move(stage, root, into)
        _remove(root, before, keep=tuple(outputs))
        _write_stamp(root, stage.name, Stamp(inputs=inputs, outputs=outputs))
    except Exception as error:
        full = _as_os_error(error, stage, root)
        if full is None:
            raise
        raise full from error
    finally:
        shutil.rmtree(into, ignore_errors=True)
    for path in state.glob(f"{unfinished.stem}*"):
        path.unlink()


def _remove(root: Path, stamp: Stamp | None, *, keep: Sequence[str]) -> None:
    """Files that an earlier run made and this one does not; a file that somebody changed is left alone."""
    for name, digest in (stamp.outputs if stamp else {}).items():
        path = root / name
        if not _covered(name, keep) and path.is_file() and sha256_of_file(path) == digest:
            path.unlink()
            for parent in path.parents:
                if parent == root or any(parent.iterdir()):
                    break
                parent.rmdir()


def _drop_former(stages: Sequence[Stage], root: Path) -> None:
    """What stages made that are no longer part of the recipe."""
    kept = [name for stage in stages for name in stage.makes]
    for path in sorted((root / STATE).glob("*.json")):
        if path.stem not in {stage.name for stage in stages} and path.name != "digests.json":
            _remove(root, read_stamp(root, path.stem), keep=kept)
            path.unlink()


def clean(root: Path) -> None:
    """Remove what a killed run left: its working directory and temporary files of stamps."""
    shutil.rmtree(root / STATE / "work", ignore_errors=True)
    for path in (root / STATE).glob(".*"):
        path.unlink()


def run(stages: Sequence[Stage], root: Path, *, told: Callable[[Stage, str], None], whole: bool = True) -> Outcome:
    """Make what is not done, in order; the caller holds the lock. `told` hears each stage and why it runs.

    A stage that this machine can't do stops those that read its files, and no others. With `whole` the stages are all
    there are, so that files of former ones are removed.
    """
    clean(root)
    if whole:
        _drop_former(stages, root)
    digests = Digests(root / STATE)
    made: list[str] = []
    cached: list[str] = []
    blocked: dict[str, str] = {}
    unmade: dict[str, str] = {}
    for stage in stages:
        waits = sorted({unmade[name] for name in stage.reads if name in unmade})
        why, inputs = "", dict[str, str]()
        lack = f"waits for {', '.join(waits)}" if waits else None
        if not waits:
            inputs = inputs_of(stage, root, digests)
            why = reason_to_run(stage, read_stamp(root, stage.name), inputs, root, digests)
            lack = stage.lack() if why else None
        if lack is not None:
            blocked[stage.name] = lack
            unmade |= dict.fromkeys(stage.makes, stage.name)
        elif why:
            told(stage, why)
            _make(stage, root, inputs)
            made.append(stage.name)
        else:
            cached.append(stage.name)
    digests.save()
    return Outcome(made=tuple(made), cached=tuple(cached), blocked=blocked)
