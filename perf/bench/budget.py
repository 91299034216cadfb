"""Division of a batch size's time between comparison, warm-up, A/A run and audit (calls on varied batches).

The least time for an interval is reserved, and no part starts that isn't expected to end in time. Times are in seconds;
`calls_s` has the time of a call of each subject.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perf.stats.stats import MIN_ROUNDS
from perf.timing.laps import Plan
from perf.timing.rounds import calls_per_block, settle_calls

from .opened_subject import CALLS_AROUND, round_robin_calls

NOISE_SHARE = 1 / 2  # of the time after the warm-up; more if the comparison has its rounds anyway
AUDIT_SHARE = 1 / 4
PLANNED_SHARE = 2 / 3  # of the time; the machine may become busier
SLACK = 1.1  # some calls are slower than those seen so far


def round_s(calls_s: Sequence[float], calls: int) -> float:
    """Return the duration of a round, two blocks of `calls` calls of each subject."""
    return 2 * (calls + settle_calls(calls)) * sum(calls_s)


def least_s(calls_s: Sequence[float]) -> float:
    """Return the duration of the fewest rounds for an interval, of one call per block, and of the plain calls."""
    return SLACK * (MIN_ROUNDS * round_s(calls_s, 1) + sum(calls_s))


@dataclass(frozen=True, slots=True)
class _Part:
    """Planned rounds, the duration of each, and the time around them."""

    rounds: int
    round_s: float
    around_s: float

    def takes_s(self, rounds: int) -> float:
        return self.around_s + rounds * self.round_s if rounds else 0.0

    def within(self, limit_s: float) -> int:
        """Return the number of rounds that fit, 0 if they are too few for an interval."""
        fitting = min(self.rounds, int((limit_s - self.around_s) / self.round_s)) if self.rounds else 0
        return fitting if fitting >= MIN_ROUNDS else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAllocation:
    """Calls per block, rounds of the A/A run and the audit (0 for no time), and their durations.

    `plain_s` is the time of the plain calls at the end, `noise_limit_s` the most that the A/A run's rounds may take.
    """

    calls: int
    noise_rounds: int
    noise_s: float
    noise_limit_s: float
    audit_rounds: int
    audit_s: float
    plain_s: float


def allocate_time(
    plan: Plan, left_s: float, calls_s: Sequence[float], *, reference_s: float | None, again_s: float
) -> TimeAllocation:
    """Divide the time that is left, with blocks so short that all planned rounds fit.

    If they don't fit with one call per block, A/A run and audit get their share, or what the comparison leaves.
    `reference_s` is the time of a call of the reference, None without one, and `again_s` the time to prepare a second
    reference.
    """
    own_s = reference_s or 0.0

    def parts(calls: int) -> tuple[_Part, _Part, _Part]:
        return (
            _Part(plan.min_rounds, round_s(calls_s, calls), sum(calls_s)),
            _Part(plan.noise_rounds if own_s else 0, round_s((own_s, own_s), calls), again_s + own_s),
            _Part(plan.audit_rounds, 2 * round_s(calls_s, round_robin_calls(calls)), CALLS_AROUND * sum(calls_s)),
        )

    calls = calls_per_block(1e3 * min(calls_s), plan.block_ms)
    while calls > 1 and sum(part.takes_s(part.rounds) for part in parts(calls)) > PLANNED_SHARE * left_s:
        calls -= 1
    compared, noise, audit = parts(calls)
    free_s, spare_s = left_s - least_s(calls_s), left_s - compared.takes_s(compared.rounds)
    noise_limit_s = min(free_s, max(NOISE_SHARE * left_s, spare_s))
    noise_rounds = noise.within(noise_limit_s)
    noise_s = noise.takes_s(noise_rounds)
    audit_rounds = audit.within(min(free_s - noise_s, max(AUDIT_SHARE * left_s, spare_s - noise_s)))
    return TimeAllocation(
        calls=calls,
        noise_rounds=noise_rounds,
        noise_s=noise_rounds * noise.round_s,
        noise_limit_s=noise_limit_s - noise.around_s,
        audit_rounds=audit_rounds,
        audit_s=audit.takes_s(audit_rounds),
        plain_s=sum(calls_s) + (own_s if noise_rounds else 0.0),
    )
