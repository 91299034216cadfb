"""The time of stages: how far a run is, and what each of them took. Imports no torch.

What a stage took is kept beside its stamp and never digested, so a second run changes nothing. One that isn't run again
keeps its record of the run that made its files, with the machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from corp_deploy.store.manifest import FILES, Efforts, Step, effort_of, load_effort, write_effort
from ground.effort import Stopwatch
from ground.gpu import gpu_name
from perf.runners.protocol import stopwatch

from .incremental import NOT_DONE, STATE, Stage, StageDirs, StageStatus

SHARES = {"moments": 20, "reduce": 25, "size": 25, "export": 4, "parity": 12, "engine": 60, "bench": 30, "gain": 15}
"""About how the time of a release is shared out among its stages, by the first word of their names; others take 1."""
LEAST_DONE = 0.05
"""Before this share of the work is done nothing is said of what is left."""


def _share(stage: str) -> int:
    return SHARES.get(stage.partition(".")[0], 1)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Pace:
    """Hears the stages as they start, and says a line of each."""

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._open: list[str] = []
        self._began = clock()
        self._now: str | None = None

    def plan(self, statuses: Sequence[StageStatus]) -> None:
        """What will be done, before the first one starts."""
        self._open = [each.stage for each in statuses if each.state in ("runs", "follows")]
        self._began = self._clock()

    def __call__(self, stage: Stage, why: str) -> None:
        """A stage, and why it is done again; told of once more, what goes otherwise than asked in it."""
        is_open = stage.name in self._open and stage.name != self._now
        self._now = stage.name
        self._say(f"{self._place(stage.name) if is_open else ''}{stage.name}{'' if why == NOT_DONE else f': {why}'}")

    def _place(self, stage: str) -> str:
        at, took = self._open.index(stage), self._clock() - self._began
        finished, left = sum(map(_share, self._open[:at])), sum(map(_share, self._open[at:]))
        words = f"{at + 1} of {len(self._open)}, {_clock(took)} so far"
        if finished >= LEAST_DONE * (finished + left):
            words += f", about {_clock(took * left / finished)} left by estimate"
        return f"[{words}] "


SUFFIX = ".effort"  # stamps are all that ends in .json there
STEPS: dict[str, Step] = {"moments": "calibrate", "reduce": "reduce", "export": "export", "engine": "build"}


def _path(root: Path, stage: str) -> Path:
    return root / STATE / f"{stage}{SUFFIX}"


def _step(stage: str) -> tuple[Step, str] | None:
    """The step that a stage is, and what it is about; None of one that is not timed."""
    first, _, about = stage.partition(".")
    return (STEPS[first], about) if first in STEPS else None


def timed(stage: Stage, device: str = "cpu", *, watch_of: Callable[[str], Stopwatch] = stopwatch) -> Stage:
    """The stage, of which torch works on `device`, with what it takes written down when it ends well."""
    step = _step(stage.name)
    if step is None:
        return stage

    def run(dirs: StageDirs) -> None:
        watch, resumed = watch_of(device), any(dirs.unfinished.parent.glob(f"{dirs.unfinished.stem}*"))
        with watch.measure(FILES):
            stage.run(replace(dirs, watch=watch))
        write_effort(_path(dirs.root, stage.name), effort_of(step[0], watch, gpu=gpu_name(device), resumed=resumed))

    return replace(stage, run=run)


def efforts_of(root: Path, stages: Sequence[str]) -> Efforts:
    """Of those stages that are timed, in their order. Raises BadInput for a damaged record."""
    steps = {name: step for name in stages if (step := _step(name)) is not None}
    return {
        step: load_effort(_path(root, name)) if _path(root, name).is_file() else None for name, step in steps.items()
    }


def efforts_in(root: Path) -> Efforts:
    """Of all stages that have a record in a release, in the order of steps; none where there is no release."""
    names = sorted(path.name.removesuffix(SUFFIX) for path in (root / STATE).glob(f"*{SUFFIX}"))
    return efforts_of(root, [name for first in STEPS for name in names if name.partition(".")[0] == first])
