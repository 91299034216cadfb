"""A time limit: what is left of it by the clock."""

from dataclasses import dataclass

from .laps import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """So many seconds from a reading of the clock on."""

    clock: Clock
    started_ns: int
    limit_s: float

    @property
    def spent_s(self) -> float:
        return (self.clock() - self.started_ns) / 1e9

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s


def limit_from_now(clock: Clock, limit_s: float) -> TimeLimit:
    """From now on."""
    return TimeLimit(clock=clock, started_ns=clock(), limit_s=limit_s)
