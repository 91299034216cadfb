"""What is planned, from how it was asked for."""

from corp_deploy.invocation.reduction import BudgetChoice, ReductionChoice

from .latency import LatencyTarget
from .plan import Budget, ReductionRequest, WithinRequest


def _target(choice: BudgetChoice) -> LatencyTarget | None:
    if choice.latency_tables is None:
        return None
    return LatencyTarget(backend="onnxruntime", batches=(choice.batch or 1,), cache=choice.latency_tables)


def _budget(choice: BudgetChoice) -> Budget | None:
    if choice.currency is None:
        return None
    assert choice.share is not None, choice
    return Budget(currency=choice.currency, share=choice.share, where=_target(choice))


def _within(choice: ReductionChoice) -> WithinRequest | None:
    if choice.within is None:
        return None
    where = _target(choice.budget)
    return WithinRequest(limit=choice.within, currency="macs" if where is None else "latency", where=where)


def request_from_choice(choice: ReductionChoice, *, seed: int = 0) -> ReductionRequest:
    """The reduction as planning takes it; the seed draws the order of a polish's inputs."""
    return ReductionRequest(
        preset=choice.method.preset,
        method=choice.method_asked,
        budget=_budget(choice.budget),
        within=_within(choice),
        auto_heads=choice.auto_heads,
        closed_loop=choice.closed_loop,
        allow_partial=choice.allow_partial,
        reads=choice.reads,
        polish=choice.polish.options(seed=seed),
        merging=choice.merging,
    )
