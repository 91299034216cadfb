"""The incremental build of a directory by stages. Imports no torch.

A stage is done if its stamp has the present digests of all its inputs and outputs. It writes into an empty directory
of its own; its files are moved to their places all or none, and then its stamp is written. So a process that is killed
at any moment leaves a stage either finished or to be run again.
"""

import errno
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ground.effort import Stopwatch
from ground.errors import BadInput, Missing, os_error_from
from ground.files import locked as locked_directory
from ground.files import sha256_of_file, sha256_of_text
from ground.places import Place
from ground.transaction import install_files, roll_back_interrupted

from .digests import IMAGE_LABELS, Digests, Stamp, files_of, read_stamp, stamp_path, write_stamp

STATE = ".stages"
DIGESTS = "digests.json"
NOT_DONE, AGAIN = "not done yet", "asked for by --again"
MACHINE = "machine"
"""The label of the input that describes the machine of a stage that measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDirs:
    """The directories that a stage works in."""

    root: Path
    """The directory of results, which holds what the stage reads."""
    into: Path
    """An empty directory that the stage writes its outputs to."""
    unfinished: Path
    """A path for the saved states of an interrupted run, whose names begin with its stem; the same for equal inputs."""
    watch: Stopwatch | None = None
    tell: Callable[[str], None] = lambda text: None
    """A function called with a sentence for each setting that the stage had to change, such as a smaller batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a build, with everything that its result depends on.

    `reads` and `outputs` are names of files below the directory of results, or of folders if they end with a slash;
    `outside` has paths of other files and folders by label; `settings` are JSON values.
    """

    name: str
    outputs: tuple[str, ...]
    run: Callable[[StageDirs], None]
    reads: tuple[str, ...] = ()
    outside: Mapping[str, Place] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    missing: Callable[[], str | None] = lambda: None
    """A function that returns the reason why this machine can't run the stage, None if it can."""
    machine: Callable[[], Mapping[str, Any]] | None = None
    """A function that returns facts of the machine, for a stage that measures."""
    earlier: Callable[[], tuple[Mapping[str, Place], Mapping[str, Any]]] = lambda: ({}, {})
    """A function that returns additional `outside` and `settings`, known only when the earlier stages are done."""
    again: bool = False
    """True for a stage that runs although it is done."""
    command: str = ""

    def __post_init__(self) -> None:
        assert len(self.outputs) > 0, self.name
        assert len(set(self.outputs)) == len(self.outputs), self.outputs
        assert not set(self.outputs) & set(self.reads), self.name


State = Literal["cached", "runs", "follows", "blocked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """The state of a stage, and the reason.

    `cached`: the stage is done. `runs`: it has to run. `follows`: it has to run if an earlier stage makes other files
    than before. `blocked`: it can't run on this machine, or it reads files of a stage that can't.
    """

    stage: str
    state: State
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The names of stages that a run finished, that were done already, and, with the reason, that can't run here."""

    finished: tuple[str, ...]
    cached: tuple[str, ...]
    blocked: Mapping[str, str]


def _covered(name: str, outputs: Sequence[str]) -> bool:
    return name in outputs or any(each.endswith("/") and name.startswith(each) for each in outputs)


def _complete(names: Set[str], outputs: Sequence[str]) -> bool:
    """Return True if all files `names` are among a stage's outputs, and no output that is a single file is absent."""
    single = {each for each in outputs if not each.endswith("/")}
    return single <= names and all(_covered(name, outputs) for name in names)


def inputs_of(stage: Stage, root: Path, digests: Digests) -> dict[str, str]:
    """Return the digests and settings that decide a stage's outputs, by label. Raises BadInput for an absent file."""
    there = [name for name in stage.reads if files_of(root / name)]
    absent = [name for name in stage.reads if name not in there and not name.endswith("/")]
    if absent:
        raise BadInput(f"stage {stage.name}: {root / absent[0]} is not there; run the stage that makes it first")
    outside, settings = stage.earlier()
    inputs = {key: json.dumps(value, sort_keys=True) for key, value in {**stage.settings, **settings}.items()}
    inputs |= {name: digests.of_path(root / name) for name in there}
    if stage.machine is not None and stage.missing() is None:
        inputs[MACHINE] = json.dumps(stage.machine(), sort_keys=True)
    every = {**stage.outside, **outside}.items()
    return inputs | {label: digests.of_path(path, pictures=label in IMAGE_LABELS) for label, path in every}


def reason_to_run(stage: Stage, stamp: Stamp | None, inputs: Mapping[str, str], root: Path, digests: Digests) -> str:
    """Return the reason why a stage has to run, "" if it is done."""
    if stamp is None:
        return NOT_DONE
    keys = {*stamp.inputs, *inputs} - ({MACHINE} - {*inputs})  # a measurement of another machine stays valid
    changed = sorted(key for key in keys if stamp.inputs.get(key) != inputs.get(key))
    if changed:
        return f"changed: {', '.join(changed[:4])}" + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
    if not _complete(stamp.outputs.keys(), stage.outputs):
        return "it makes other files now"
    for name, digest in stamp.outputs.items():
        if not (root / name).is_file():
            return f"{name} is gone"
        if digests.of_file(root / name) != digest:
            return f"{name} was changed after it was made"
    return AGAIN if stage.again else ""


def stage_statuses(stages: Sequence[Stage], root: Path) -> list[StageStatus]:
    """Return the states that a run would find now; write nothing."""
    digests, made_later, statuses = Digests(root / STATE / DIGESTS), dict[str, str](), list[StageStatus]()
    for stage, status, _ in _statuses(stages, root, digests, made_later):
        statuses.append(status)
        if status.state in ("runs", "follows"):
            made_later |= dict.fromkeys(stage.outputs, stage.name)
    return statuses


def _statuses(
    stages: Sequence[Stage], root: Path, digests: Digests, made_later: Mapping[str, str]
) -> Iterator[tuple[Stage, StageStatus, dict[str, str]]]:
    """Yield each stage with its status and inputs, computed after the caller has run the stages before it."""
    absent: dict[str, str] = {}
    for stage in stages:
        status, inputs = _status(stage, root, digests, made_later, absent)
        if status.state == "blocked":
            absent |= dict.fromkeys(stage.outputs, stage.name)
        yield stage, status, inputs


def _status(
    stage: Stage, root: Path, digests: Digests, made_later: Mapping[str, str], absent: Mapping[str, str]
) -> tuple[StageStatus, dict[str, str]]:
    """Return the status of a stage and its inputs.

    `made_later` maps files to the stages that will make them, `absent` to the stages that can't.
    """
    inputs = dict[str, str]()

    def found(state: State, why: str) -> tuple[StageStatus, dict[str, str]]:
        return StageStatus(stage=stage.name, state=state, why=why), inputs

    waits, after = (sorted({of[name] for name in stage.reads if name in of}) for of in (absent, made_later))
    if waits:
        return found("blocked", f"waits for {', '.join(waits)}")
    stamp = read_stamp(root / STATE, stage.name)
    if after and stamp is not None:
        return found("follows", f"if {', '.join(after)} comes out different")
    inputs |= {} if after else inputs_of(stage, root, digests)
    why = NOT_DONE if after else reason_to_run(stage, stamp, inputs, root, digests)
    if not why:
        return found("cached", "nothing changed")
    missing = stage.missing()
    return found("runs", why) if missing is None else found("blocked", missing)


def locked_release(root: Path) -> AbstractContextManager[None]:
    """Lock the directory of a release for this process; raise BadInput if another process holds the lock."""
    return locked_directory(root, root / STATE / "lock", what="release")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _as_os_error(error: Exception, stage: Stage, root: Path) -> OSError | None:
    """Return an OSError that names the stage for a full disk or an error that hides an OSError; None for others."""
    fault = None if isinstance(error, BadInput | Missing) else os_error_from(error)
    if fault is None or (fault is error and fault.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        return None
    return OSError(fault.errno, fault.strerror, f"{root} (stage {stage.name})")


def _move(stage: Stage, root: Path, into: Path, before: Stamp | None) -> dict[str, str]:
    """Move a stage's new files to their places and remove its old ones, all or none; return the new files' digests."""
    written = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    if not _complete(written, stage.outputs):
        raise RuntimeError(f"stage {stage.name} was to make {sorted(stage.outputs)}, but made {sorted(written)}")
    outputs = {name: sha256_of_file(into / name) for name in sorted(written)}
    stale = _left_over(root, before, keep=tuple(outputs))
    install_files(root, {name: into / name for name in outputs}, removed=stale)
    _remove_empty(root, stale)
    for folder in {(root / name).parent for name in outputs}:
        _sync(folder)
    return outputs


def _run_stage(stage: Stage, root: Path, inputs: dict[str, str], tell: Callable[[str], None]) -> None:
    state = root / STATE
    into = state / "work"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    key = sha256_of_text(json.dumps(inputs, sort_keys=True))[:16]
    unfinished = state / f"unfinished-{stage.name}-{key}.safetensors"
    for stale in state.glob(f"unfinished-{stage.name}-*"):
        if not stale.name.startswith(unfinished.stem):
            stale.unlink()
    before = read_stamp(state, stage.name)
    try:
        stage.run(StageDirs(root=root, into=into, unfinished=unfinished, tell=tell))
        outputs = _move(stage, root, into, before)
        write_stamp(state, stage.name, Stamp(inputs=inputs, outputs=outputs))
    except Exception as error:
        full = _as_os_error(error, stage, root)
        if full is None:
            raise
        raise full from error
    finally:
        shutil.rmtree(into, ignore_errors=True)
    for path in state.glob(f"{unfinished.stem}*"):
        path.unlink()


def _left_over(root: Path, stamp: Stamp | None, *, keep: Sequence[str]) -> list[str]:
    """Return the files of an earlier run's stamp that are not in `keep` and have not been changed since."""
    return [
        name
        for name, digest in (stamp.outputs if stamp else {}).items()
        if not _covered(name, keep) and (root / name).is_file() and sha256_of_file(root / name) == digest
    ]


def _remove_empty(root: Path, names: Sequence[str]) -> None:
    for name in names:
        for parent in (root / name).parents:
            if parent == root or (parent.exists() and any(parent.iterdir())):
                break
            if parent.exists():
                parent.rmdir()


def _drop_former(stages: Sequence[Stage], root: Path) -> None:
    """Remove the files and stamps of stages that the build no longer has."""
    keep = [name for stage in stages for name in stage.outputs]
    current = {stamp_path(root / STATE, stage.name) for stage in stages} | {root / STATE / DIGESTS}
    for path in sorted((root / STATE).glob("*.json")):
        if path not in current:
            stale = _left_over(root, read_stamp(root / STATE, path.stem), keep=keep)
            for name in stale:
                (root / name).unlink()
            _remove_empty(root, stale)
            path.unlink()


def clean(root: Path) -> None:
    """Roll back the files that a killed run was replacing, and remove its working directory and temporary files."""
    roll_back_interrupted(root)
    shutil.rmtree(root / STATE / "work", ignore_errors=True)
    for path in (root / STATE).glob(".*"):
        path.unlink()


def run_stages(
    stages: Sequence[Stage], root: Path, *, starts: Callable[[Stage, str], None], every: Sequence[Stage] = ()
) -> Outcome:
    """Run the stages that are not done, in order, while the caller holds the lock.

    `starts` is called with each stage and the reason why it runs, and again with each sentence of StageDirs.tell. A
    stage that can't run on this machine blocks only the stages that read its files. If `every` has all stages of the
    build, the files of stages that the build no longer has are removed.
    """
    clean(root)
    if every:
        _drop_former(every, root)
    digests, by_state = Digests(root / STATE / DIGESTS), defaultdict[State, dict[str, str]](dict)
    for stage, status, inputs in _statuses(stages, root, digests, {}):
        if status.state == "runs":
            starts(stage, status.why)
            _run_stage(stage, root, inputs, partial(starts, stage))
        by_state[status.state][stage.name] = status.why
    digests.save()
    return Outcome(finished=(*by_state["runs"],), cached=(*by_state["cached"],), blocked=by_state["blocked"])
