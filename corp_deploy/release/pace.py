"""The progress of a run, and the records of the time and memory that stages took. Imports no torch.

Such a record (NAME.effort, with the machine) is kept beside the stage's stamp, but is no input of other stages. A stage
that is not run again keeps the record of the run that made its files.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from corp_deploy.store.manifest import Efforts, Step, load_effort, timed_on, write_effort
from ground.effort import Stopwatch
from perf.runners.protocol import build_stopwatch
from perf.timing.energy import NoSensor, open_sensor

from .incremental import NOT_DONE, STATE, Stage, StageDirs, StageStatus
from .recipe import Recipe
from .targets import ON_CPU, ReleaseTarget

SHARES = {"moments": 20, "reduce": 25, "size": 25, "export": 4, "parity": 12, "engine": 60, "bench": 30, "gain": 15}
"""Estimated durations of stages relative to one another, by the first word of their names; other stages have 1."""
LEAST_DONE = 0.05
"""The share of the work that has to be done before the remaining time is estimated."""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Pace:
    """A printer of a line for each stage that starts, with an estimate of the time left.

    `seconds` has the time limits of stages, by name, that have one. run_stages calls an instance as `starts`.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        seconds: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._seconds, self._clock = say, seconds, clock
        self._open, self._took = list[str](), dict[str, float]()
        self._began = self._started = clock()
        self._now: str | None = None

    def plan(self, statuses: Sequence[StageStatus]) -> None:
        self._open = [each.stage for each in statuses if each.state in ("runs", "follows")]
        self._began = self._clock()

    def __call__(self, stage: Stage, why: str) -> None:
        place = ""
        if stage.name != self._now and stage.name in self._open:
            now = self._clock()
            if self._now is not None:
                self._took[self._now] = now - self._started
            self._started, place = now, self._place(stage.name, now)
        self._now = stage.name
        self._say(f"{place}{stage.name}{'' if why == NOT_DONE else f': {why}'}")

    def _place(self, stage: str, now: float) -> str:
        at = self._open.index(stage)
        words = f"{at + 1} of {len(self._open)}, {_clock(now - self._began)} so far"
        left = self._left(self._open[at:])
        return f"[{words}] " if left is None else f"[{words}, about {_clock(left)} left by estimate] "

    def _left(self, stages: Sequence[str]) -> float | None:
        """Estimate the seconds that `stages` will take from the times so far; None before LEAST_DONE of the work."""
        ran = {name: took for name, took in self._took.items() if name not in self._seconds}
        unlimited = [name for name in stages if name not in self._seconds]
        finished, left = (sum(SHARES.get(name.partition(".")[0], 1) for name in each) for each in (ran, unlimited))
        if left and finished < LEAST_DONE * (finished + left):
            return None
        limited = sum(self._seconds.get(name, 0.0) for name in stages)
        return limited + (sum(ran.values()) * left / finished if left else 0.0)


def limited_seconds(recipe: Recipe) -> dict[str, float]:
    """Return the time limit, in seconds over all batch sizes, of each stage that times models, by its name."""
    limits_s = {target.name: recipe.bench.time_limit + _energy_limit_s(recipe, target) for target in recipe.targets}
    count = len(recipe.bench.batches) * recipe.bench.launches
    return {f"{kind}.{name}": limit_s * count for name, limit_s in limits_s.items() for kind in ("bench", "gain")}


def _energy_limit_s(recipe: Recipe, target: ReleaseTarget) -> float:
    with open_sensor("cpu" if target.name in ON_CPU else "cuda") as sensor:
        return 0.0 if isinstance(sensor, NoSensor) else recipe.bench.energy_limit_s


SUFFIX = ".effort"  # only stamps end in .json there
STEPS: dict[str, Step] = {"moments": "calibrate", "reduce": "reduce", "export": "export", "engine": "build"}


def _path(root: Path, stage: str) -> Path:
    return root / STATE / f"{stage}{SUFFIX}"


def _step(stage: str) -> tuple[Step, str] | None:
    first, _, about = stage.partition(".")
    return (STEPS[first], about) if first in STEPS else None


def timed(stage: Stage, device: str = "cpu", *, watch_of: Callable[[str], Stopwatch] = build_stopwatch) -> Stage:
    """Return a stage that also writes its effort record, with torch's memory on `device`; unchanged if not in STEPS."""
    step = _step(stage.name)
    if step is None:
        return stage

    def run(dirs: StageDirs) -> None:
        resumed = any(dirs.unfinished.parent.glob(f"{dirs.unfinished.stem}*"))
        with timed_on(device, watch_of) as watch:
            stage.run(replace(dirs, watch=watch))
        write_effort(_path(dirs.root, stage.name), step[0], watch, device=device, resumed=resumed)

    return replace(stage, run=run)


def efforts_of(root: Path, stages: Sequence[str]) -> Efforts:
    steps = {name: step for name in stages if (step := _step(name)) is not None}
    return {
        step: load_effort(_path(root, name)) if _path(root, name).is_file() else None for name, step in steps.items()
    }


def efforts_in(root: Path) -> Efforts:
    names = sorted(path.name.removesuffix(SUFFIX) for path in (root / STATE).glob(f"*{SUFFIX}"))
    return efforts_of(root, [name for first in STEPS for name in names if name.partition(".")[0] == first])
