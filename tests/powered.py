"""A simulated counter of energy on a fake clock, subjects that draw power, and records of planted joules."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perf.record.energy import EnergyBlock, EnergyRun
from perf.timing.laps import Clock, Laps
from tests.doubles import FakeClock

SUBJECTS = ("dense", "dense again", "reduced")


@dataclass
class FakeSensor:
    """A counter that rises by the power of the idle machine and of calls, and shows it every `period_s`."""

    clock: FakeClock
    idle_w: float = 50.0
    period_s: float = 0.1
    stands_after_s: float = 1e9
    name: str = "a counter"
    times_ns: list[int] = field(default_factory=lambda: [0])
    loads_j: list[float] = field(default_factory=lambda: [0.0])

    def draw(self, watts: float, ms: float) -> None:
        for load_j, pass_ms in ((0.0, 0.0), (watts * ms / 1e3, ms)):
            self.clock.pass_ms(pass_ms)
            self.times_ns.append(self.clock())
            self.loads_j.append(self.loads_j[-1] + load_j)

    def joules(self) -> float:
        updated_s = min(self.clock() / 1e9 // self.period_s * self.period_s, self.stands_after_s)
        after = min(bisect_right(self.times_ns, updated_s * 1e9), len(self.times_ns) - 1)
        ends = slice(max(after - 1, 0), after + 1)
        load_j = float(np.interp(updated_s * 1e9, self.times_ns[ends], self.loads_j[ends]))
        return 7e6 + self.idle_w * updated_s + load_j


@dataclass
class Powered:
    """A subject whose calls take `call_ms` and `watts` more than the idle machine, which rise by a share per second."""

    sensor: FakeSensor
    call_ms: float
    watts: float
    rise_per_s: float = 0.0

    def laps(self, calls: int, clock: Clock) -> Laps:
        for _ in range(calls):
            self.sensor.draw(self.watts * (1 + self.rise_per_s * clock() / 1e9), self.call_ms)
        return Laps(calls=calls, wall_ms=calls * self.call_ms, compute_ms=(self.call_ms,) * calls)


def energy_of(
    joules: Mapping[str, float], *, rounds: int = 8, spread: float = 0.01, idle_w: float = 50.0, **every_block: Any
) -> EnergyRun:
    """Make the record of blocks of 2 s and 100 images that take these joules per image beyond the idle machine."""
    rng, pause = (
        np.random.default_rng(0),
        EnergyBlock(round=0, subject="idle", seconds=2.0, joules=2 * idle_w, images=0),
    )
    return EnergyRun(
        sensor="RAPL of package-0",
        period_s=0.001,
        idle=(pause, replace(pause, round=1)),
        blocks=tuple(
            EnergyBlock(
                round=index,
                subject=name,
                seconds=2.0,
                joules=2 * idle_w + 100 * joules[name] * float(rng.lognormal(sigma=spread)),
                images=100,
                **every_block,
            )
            for index in range(rounds)
            for name in SUBJECTS[:: 1 if index % 2 == 0 else -1]
            if name in joules
        ),
    )
