"""What the stages of a release took, kept beside their stamps: never digested, so a second run changes nothing.

A stage that is not run again keeps the record of the run that made its files, with the machine it ran on. Imports no
torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from corp_deploy.store.manifest import Efforts, Step, load_effort, timed_on, write_effort
from ground.effort import Stopwatch
from perf.runners.protocol import stopwatch

from .incremental import STATE, Stage, StageDirs

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
        resumed = any(dirs.unfinished.parent.glob(f"{dirs.unfinished.stem}*"))
        with timed_on(device, watch_of) as watch:
            stage.run(replace(dirs, watch=watch))
        write_effort(_path(dirs.root, stage.name), step[0], watch, device=device, resumed=resumed)

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
