"""Measurement of energy at one batch size, after that of latency: pauses and blocks of several seconds.

A block begins and ends with an update of the sensor's counter, so that a slow counter doesn't blur its ends. Rounds
alternate their direction (1 2 3, 3 2 1), and only whole pairs are kept, so that a steady drift cancels.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ground.quantity import format_number
from perf.record.energy import EnergyBlock, EnergyRun
from perf.timing.energy import EnergySensor
from perf.timing.laps import Bound, Clock
from perf.timing.rounds import no_garbage_collection
from perf.timing.watch import Watch, unwatched

LEAST_BLOCK_S, LEAST_PERIODS = 2.0, 20
REST_S = 1.0  # until the processor has cooled down and lowered its clocks
STEPS, LEAST_STEP_S = 10, 0.01  # readings per period of the counter, while its update is awaited
STANDING_PERIODS = 20  # without an update: the counter stands still
IDLE = "idle"
Report = Callable[[str], None]


class StandingCounter(Exception):
    """A counter that no longer rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyMeter:
    """A sensor, and the rules to measure one batch size with it within `limit_s` seconds."""

    sensor: EnergySensor
    limit_s: float
    watch: Watch = unwatched
    clock: Clock = time.perf_counter_ns
    sleep: Callable[[float], None] = time.sleep

    @property
    def block_s(self) -> float:
        return max(LEAST_BLOCK_S, LEAST_PERIODS * self.sensor.period_s)

    @property
    def step_s(self) -> float:
        return max(self.sensor.period_s / STEPS, LEAST_STEP_S)

    def measure(self, bounds: Mapping[str, tuple[Bound, float]], batch: int, report: Report) -> EnergyRun | str:
        """Return the energy of bound subjects, each with the seconds of a call, or why it was not measured."""
        started, pause_s = self.clock(), REST_S + self.block_s + 2 * self.step_s
        edge_s = max(self.step_s, self.sensor.period_s)
        pair_s = 2 * sum(self.block_s + 2 * max(edge_s, call_s) for _, call_s in bounds.values())
        least = format_number(2 * pause_s + pair_s, 2)
        blocks = list[EnergyBlock]()
        if 2 * pause_s + pair_s > self.limit_s:
            return f"no time for the energy, it takes {least} s at least; give a longer --energy-time"
        try:
            with no_garbage_collection():
                idle = [self._pause(0, report)]
                while not blocks or (self.clock() - started) / 1e9 + pair_s + pause_s <= self.limit_s:
                    begun, first = self.clock(), len(blocks) // len(bounds)
                    for index, names in ((first, [*bounds]), (first + 1, [*bounds][::-1])):
                        report(f"energy, round {index + 1}")
                        blocks += [self._calls(index, name, *bounds[name], batch) for name in names]
                    pair_s = max(pair_s, (self.clock() - begun) / 1e9)
                idle.append(self._pause(1, report))
        except (StandingCounter, OSError) as error:
            return f"no energy: {error}"
        sensor = self.sensor
        return EnergyRun(sensor=sensor.name, period_s=sensor.period_s, idle=tuple(idle), blocks=tuple(blocks))

    def _pause(self, index: int, report: Report) -> EnergyBlock:
        report("energy of the idle machine")
        self.sleep(REST_S)

        def work() -> int:
            self.sleep(self.step_s)
            return 0

        return self._block(index, IDLE, work)

    def _calls(self, index: int, name: str, bound: Bound, call_s: float, batch: int) -> EnergyBlock:
        calls = max(round(self.step_s / call_s), 1)
        return self._block(index, name, lambda: batch * bound.laps(calls, self.clock).calls)

    def _block(self, index: int, subject: str, work: Callable[[], int]) -> EnergyBlock:
        _, begun_j, begun_ns = self._next_update(work)
        before, images = self.watch(), 0
        while (self.clock() - begun_ns) / 1e9 < self.block_s:
            images += work()
        more, ended_j, ended_ns = self._next_update(work)
        state = self.watch().since(before)
        return EnergyBlock(
            round=index,
            subject=subject,
            seconds=(ended_ns - begun_ns) / 1e9,
            joules=ended_j - begun_j,
            images=images + more,
            gpu=state.gpu,
            cpu=state.cpu,
        )

    def _next_update(self, work: Callable[[], int]) -> tuple[int, float, int]:
        """Work until the counter rises, and return the images done, the joules and the time."""
        images, before_j, started = 0, self.sensor.joules(), self.clock()
        while True:
            images += work()
            now_j, now_ns = self.sensor.joules(), self.clock()
            if now_j > before_j:
                return images, now_j, now_ns
            waited_s = (now_ns - started) / 1e9
            if waited_s > max(STANDING_PERIODS * self.sensor.period_s, LEAST_BLOCK_S):
                raise StandingCounter(f"the counter of {self.sensor.name} stood still for {waited_s:.1f} s")
