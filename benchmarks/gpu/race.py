"""The timing of several subjects, in turns within every round, dense first and last, in one process.

See perf.timing.rounds; ratios are medians over rounds of the ratio within a round, with bootstrap intervals
(perf.stats.stats). Compute is the time between CUDA events around the model; wall time adds the copies of images and
logits.
"""

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from benchmarks.gpu.record import Refused, Row, reason_of
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.subjects import Images, Subject
from perf.record.runs import TimedBlock
from perf.stats.quiet import samples
from perf.stats.stats import Interval, median_interval, rate_interval, ratio_of_medians
from perf.stats.summary import realised_share
from perf.timing.laps import Bound, Plan, warm_up
from perf.timing.rounds import calls_per_block, measure_rounds
from perf.timing.watch import Watch

DENSE, AGAIN = "dense", "dense again"
# A GPU whose work is queued ahead is steady within a few calls; six rounds are the fewest that give an interval.
PLAN = Plan(block_ms=10.0, min_rounds=8, noise_rounds=0, warm_up_window=8, warm_up_min_s=0.1, warm_up_limit_s=2.0)
LONG_PLAN = replace(PLAN, min_rounds=6, warm_up_window=4)
SMALL_PLAN = Plan(block_ms=1.0, min_rounds=6, noise_rounds=0, warm_up_window=4, warm_up_min_s=0.0, warm_up_limit_s=0.1)
# Estimates to plan rows: multiply-adds a second of a half-precision ViT, and seconds to compile one block.
RATE, COMPILING_S = 2e14, 9.0


def plan_of(batch: int, setting: Setting) -> Plan:
    """Return the plan of a batch size, with fewer warm-up calls and rounds for slow calls."""
    if setting.small:
        return SMALL_PLAN
    return LONG_PLAN if batch >= 256 else PLAN


def estimate_s(macs: int, batch: int, subjects: int, compiled: int, setting: Setting) -> float:
    """Estimate the seconds to build, warm up and measure subjects and the dense one again, some of them compiled."""
    if setting.small:
        return 0.0
    plan, call_s = plan_of(batch, setting), macs * batch / RATE + 2e-4
    rounds_s = 2 * plan.min_rounds * max(plan.block_ms / 1e3, call_s)
    warm_s = max(plan.warm_up_min_s, plan.warm_up_window * call_s) + 6 * call_s
    return 1.2 + COMPILING_S * compiled + (subjects + 1) * (rounds_s + warm_s)


def figures(interval: Interval | None) -> list[float | None] | None:
    """Return value, low and high; an open end is None."""
    return None if interval is None else list(interval.figures)


def bounds_of(subjects: Mapping[str, Subject], images: Images) -> tuple[dict[str, Bound], dict[str, str]]:
    """Return the subjects that are ready, and the refused ones with the reason. Raises Refused for the dense one."""
    bounds, refused = dict[str, Bound](), dict[str, str]()
    for name, subject in subjects.items():
        try:
            bounds[name] = subject.bind(images)
        except Refused as error:
            if name == DENSE:
                raise
            refused[name] = reason_of(error)
    bounds[AGAIN] = subjects[DENSE].bind(images)
    return bounds, refused


def timed(bounds: dict[str, Bound], plan: Plan, watch: Watch) -> tuple[tuple[TimedBlock, ...], int]:
    """Return the blocks of all rounds, and the number of calls in a block."""
    call_ms = min(warm_up(bound, plan, perf_counter_ns).call_ms() for bound in bounds.values())
    calls = calls_per_block(call_ms, plan.block_ms)
    return measure_rounds(bounds, plan.min_rounds, calls=calls, clock=perf_counter_ns, watch=watch), calls


def subject_figures(blocks: tuple[TimedBlock, ...], name: str, batch: int, macs: Mapping[str, int]) -> Row:
    """Return p50, throughput, speed-up and realised share of one subject."""
    own, reference, wall = (samples(blocks, *at) for at in ((name,), (DENSE,), (name, "wall")))
    speedup = ratio_of_medians(reference, own)
    p50 = median_interval(own)
    images_R = np.asarray([batch * len(times) for times in wall], dtype=np.float64)
    rate = rate_interval(images_R, np.asarray([times.sum() / 1e3 for times in wall]))
    return {
        "round_medians_ms": [float(np.median(times)) for times in own],
        "p50_ms": figures(p50),
        "images_per_s_compute": batch / p50.value * 1e3,
        "images_per_s_wall": figures(rate),
        "speedup": figures(speedup),
        "realised_share": realised_share(speedup, macs[DENSE], macs.get(name, macs[DENSE])),
    }


def raced(subjects: Mapping[str, Subject], images: Images, macs: Mapping[str, int], plan: Plan, watch: Watch) -> Row:
    """Time all subjects; return the figures of each, the refused ones, and the numbers of calls and rounds.

    `macs` has those of one image by subject. Raises Refused if the timed output of `dense` differs from its plain one.
    """
    bounds, refused = bounds_of(subjects, images)
    blocks, calls = timed(bounds, plan, watch)
    return {
        "calls_per_block": calls,
        "rounds": len({block.round for block in blocks}),
        "dropped_rounds": len({block.round for block in blocks if block.dropped is not None}),
        "subjects": {name: subject_figures(blocks, name, len(images), macs) for name in bounds},
        "refused": refused,
        "memory": {name: subject.memory(images) for name, subject in subjects.items()},
    }
