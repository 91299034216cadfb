"""Joules per image beyond the idle machine's, with intervals over rounds, and the noise of the reference's own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perf.record.energy import EnergyBlock, EnergyRun
from perf.record.runs import name_of_rerun

from .quiet import throttle_reasons, throttled_line, whole_rounds
from .stats import DEFAULT_CONFIDENCE, MIN_ROUNDS, Interval, rate_interval, ratio_of_medians

IDLE_DRIFT_REL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySummary:
    """Energy at one batch size over `rounds`; a subject is missing if it took no more power than the idle machine.

    `ratio`, and `noise` of the reference against itself (ideally 1), are joules of the reference over the candidate's.
    `idle_w` is the idle power that was subtracted, from `idle_before_w` and `idle_after_w`.
    """

    sensor: str
    idle_w: float
    idle_before_w: float
    idle_after_w: float
    joules: Mapping[str, Interval]
    ratio: Interval | None
    noise: Interval | None
    rounds: int
    throttled: tuple[str, ...]

    @property
    def line(self) -> str:
        """Joules, the ratio with the noise beside it, the sensor and the idle power."""
        spent = [f"{name} {joules.describe('.3g')} J/image" for name, joules in self.joules.items()]
        ratios = {"reference over candidate": self.ratio, "reference against itself": self.noise}
        told = [f"{words} {ratio.describe('.3f')}" for words, ratio in ratios.items() if ratio is not None]
        return ", ".join((*spent, *told, f"{self.sensor}, idle power of {self.idle_w:.1f} W subtracted"))


def summarise_energy(run: EnergyRun, names: Sequence[str], confidence: float = DEFAULT_CONFIDENCE) -> EnergySummary:
    """Compute joules per image of the two subjects, reference first."""
    reference, candidate = names
    idle_w = sum(pause.joules for pause in run.idle) / sum(pause.seconds for pause in run.idle)
    rounds = whole_rounds(run.blocks)
    kept = {name: [b for b in run.blocks if b.subject == name and b.round in set(rounds)] for name in names}
    again = [b for b in run.blocks if b.subject == name_of_rerun(reference) and b.round in set(rounds)]
    return EnergySummary(
        sensor=run.sensor,
        idle_w=idle_w,
        idle_before_w=run.idle[0].joules / run.idle[0].seconds,
        idle_after_w=run.idle[-1].joules / run.idle[-1].seconds,
        joules={name: found for name, own in kept.items() if (found := _per_image(own, idle_w, confidence))},
        ratio=_ratio(kept[reference], kept[candidate], idle_w, confidence),
        noise=_ratio(kept[reference], again, idle_w, confidence),
        rounds=len(rounds),
        throttled=throttle_reasons(run.blocks),
    )


def energy_warnings(energy: EnergySummary, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in energy.joules:
            yield f"{name}: it takes no more power than the idle machine ({energy.idle_w:.1f} W), so it has no joules"
    if energy.rounds < MIN_ROUNDS:
        few = f"energy: {energy.rounds} rounds are too few for an interval, {MIN_ROUNDS} make one"
        yield f"{few}; give a longer --energy-time"
    if energy.throttled:
        yield f"energy: {throttled_line(energy.throttled)}"
    before_w, after_w = energy.idle_before_w, energy.idle_after_w
    if abs(after_w - before_w) > IDLE_DRIFT_REL * energy.idle_w:
        moved = f"energy: idle power moved from {before_w:.1f} to {after_w:.1f} W"
        yield f"{moved}; other programs ran, or it was still hot"


def _beyond_idle(block: EnergyBlock, idle_w: float) -> float:
    return block.joules - idle_w * block.seconds


def _per_image(blocks: Sequence[EnergyBlock], idle_w: float, confidence: float) -> Interval | None:
    joules_R = np.asarray([_beyond_idle(block, idle_w) for block in blocks], dtype=np.float64)
    images_R = np.asarray([block.images for block in blocks], dtype=np.float64)
    if not len(blocks) or joules_R.sum() <= 0:
        return None
    return rate_interval(joules_R, images_R, launches=[block.launch for block in blocks], confidence=confidence)


def _ratio(
    above: Sequence[EnergyBlock], below: Sequence[EnergyBlock], idle_w: float, confidence: float
) -> Interval | None:
    sides = [[np.asarray([_beyond_idle(each, idle_w) / each.images]) for each in own] for own in (above, below)]
    if not sides[0] or len(sides[0]) != len(sides[1]) or min(float(each[0]) for own in sides for each in own) <= 0:
        return None
    return ratio_of_medians(*sides, launches=[block.launch for block in above], confidence=confidence)
