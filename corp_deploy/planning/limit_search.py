"""The smallest model within a limit: bisection over the budget, with every model on the way reduced and judged.

The error is only nearly monotone in the budget, so nothing is interpolated: the answer is a model that was measured to
be within the limit, one step above a model that was measured not to be.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corp_deploy.invocation.budget_choice import Limit
from corp_deploy.reduction.model import Reduction
from ground.errors import BadInput
from perf.stats.decision import samples_for_interval, samples_for_share, share_interval

from .budget_planner import Planner
from .judging import Judge, Judgement, JudgingInputs
from .request import WidthPlan

STEPS = 100  # budgets are hundredths of the dense cost: a hundred images can't tell finer steps apart


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTrial:
    """One budget: the share of the cost that it keeps, its model's judgement, and whether that is within the limit."""

    share: float
    judged: Judgement
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSearch:
    """The trials of a search in their order; the answer is that of the smallest share that holds the limit."""

    limit: Limit
    currency: str
    judging: JudgingInputs
    trials: tuple[BudgetTrial, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "limit": str(self.limit),
            "currency": self.currency,
            "judges": str(self.judging),
            "images": self.judging.inputs.digest,
            "trials": [
                {"share": trial.share, "judged": trial.judged.as_json(), "holds": trial.holds} for trial in self.trials
            ],
        }

    def __str__(self) -> str:
        limit, count = self.limit, len(self.trials)
        answer = min((trial for trial in self.trials if trial.holds), key=lambda trial: trial.share)
        below = [trial for trial in self.trials if trial.share < answer.share]
        nearest = max(below, key=lambda trial: trial.share, default=None)
        smaller = (
            "no widths are narrower"
            if nearest is None
            else f"{nearest.share:.2f} gives {format_figure(limit, nearest.judged.value)}"
        )
        surely = limit.holds(answer.judged.low) and limit.holds(answer.judged.high)
        past = "" if surely else f", chosen by the point: {self._inputs_to_decide(answer.judged)}"
        return (
            f"within {limit}: {answer.share:.2f} of the dense {self.currency} gives "
            f"{_describe(limit, answer.judged, past)} on {self.judging}; {smaller}; {count} "
            f"model{'s were' if count > 1 else ' was'} reduced and judged"
        )

    def _inputs_to_decide(self, judged: Judgement) -> str:
        """Return a sentence on how many inputs would decide whether the limit holds, worded as in proofs."""
        gap, inputs = judged.value - self.limit.value, self.judging.inputs
        if self.limit.measure == "agreement":

            def decides(count: int) -> bool:
                return share_interval(judged.value, count).low >= self.limit.value

            return samples_for_share(decides, inputs.count, inputs.noun)
        width = judged.value - judged.low if gap > 0 else judged.high - judged.value
        return samples_for_interval(gap, width, inputs.count, inputs.noun)


def format_figure(limit: Limit, value: float) -> str:
    """Format a measured value with its unit."""
    return {"accuracy": f"{value:+.2f} points", "agreement": f"{value:.2%}", "error": f"{value:.3g}"}[limit.measure]


def _describe(limit: Limit, judged: Judgement, past: str = "") -> str:
    """Format a judgement with its interval and, if there are several outputs, the values of the others."""
    shown = (
        f"{format_figure(limit, judged.value)} (95 % interval {format_figure(limit, judged.low)} to "
        f"{format_figure(limit, judged.high)}{past})"
    )
    if not judged.every:
        return shown
    others = (
        f"{each.output} {format_figure(limit, each.value)}" for each in judged.every if each.output != judged.output
    )
    return f"{shown} at {judged.output}, the worst output ({', '.join(others)})"


def _unreachable(limit: Limit, currency: str, judging: JudgingInputs, trials: Sequence[BudgetTrial]) -> BadInput:
    if not trials:
        return BadInput(f"--within '{limit}': no widths keep less than the whole of the dense {currency}; see inspect")
    closest = trials[0]
    for trial in trials[1:]:
        if limit.better(trial.judged.value, closest.judged.value):
            closest = trial
    return BadInput(
        f"--within '{limit}': out of reach on {judging}; the closest of the {len(trials)} models tried keeps "
        f"{closest.share:.2f} of the dense {currency} and gives {_describe(limit, closest.judged)}; loosen the limit"
    )


def find_smallest_within(
    limit: Limit,
    planner: Planner,
    judging: JudgingInputs,
    reduced: Callable[[WidthPlan], Reduction],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Reduction, WidthPlan]:
    """Return the reduction of the smallest budget that is within the limit, and its plan with the trials.

    `reduced` carries a plan out; `on_progress` receives the number of models tried and the most that can be. At most
    log2(STEPS) + 1 models are reduced, each judged in one pass over the inputs. Raises BadInput if even the largest
    budget is not within the limit.
    """
    judge = Judge(planner.probe.model, judging, limit.measure)
    fails, holds = max(math.ceil(planner.narrowest() * STEPS + 1e-9), 1) - 1, STEPS
    trials: list[BudgetTrial] = []
    answer: tuple[Reduction, WidthPlan] | None = None
    while holds - fails > 1:
        middle = (fails + holds) // 2
        planned = planner.widths_at(middle / STEPS)
        reduction = reduced(planned)
        judged = judge.of(reduction.model)
        trials.append(BudgetTrial(share=middle / STEPS, judged=judged, holds=limit.holds(judged.value)))
        if trials[-1].holds:
            holds, answer = middle, (reduction, planned)
        else:
            fails = middle
        if on_progress is not None:
            on_progress(len(trials), len(trials) + max(holds - fails - 1, 0).bit_length())
    if answer is None:
        raise _unreachable(limit, planner.currency, judging, trials)
    within = LimitSearch(limit=limit, currency=planner.currency, judging=judging, trials=tuple(trials))
    reduction, planned = answer
    return reduction, replace(planned, decisions=(str(within), *planned.decisions), within=within.as_json())
