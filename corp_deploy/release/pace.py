"""How far a run of stages is: which of how many, the time so far, and an estimate of what is left. Imports no torch."""

import time
from collections.abc import Callable, Sequence

from .incremental import NOT_DONE, Stage, StageStatus

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
