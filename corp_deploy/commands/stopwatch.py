"""What a command takes, told beside its result and kept beside what it made, never written into what is digested."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corp_deploy.store.manifest import Step
    from ground.effort import Stopwatch


@contextmanager
def stopwatch_on(device: str = "cpu") -> Iterator["Stopwatch"]:
    """All that is done meanwhile is taken; what no part of it claims is reading and writing."""
    from corp_deploy.store.manifest import FILES
    from perf.runners.protocol import stopwatch

    watch = stopwatch(device)
    with watch.measure(FILES):
        yield watch


def keep_effort(watch: "Stopwatch", output: Path, *, step: "Step", device: str = "cpu", resumed: bool = False) -> None:
    """Write what a step took beside what it made."""
    from corp_deploy.store.manifest import effort_of, path_beside, write_effort
    from ground.gpu import gpu_name

    write_effort(path_beside(output), effort_of(step, watch, gpu=gpu_name(device), resumed=resumed))
