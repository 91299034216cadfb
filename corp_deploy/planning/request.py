"""What is planned, from how it was asked for."""

from corp_deploy.invocation.reduction import BudgetChoice, ReductionChoice

from .latency import LatencyTarget
from .plan import Budget, ReductionRequest


def _budget(choice: BudgetChoice) -> Budget | None:
    if choice.currency is None:
        return None
    assert choice.share is not None, choice
    where = None
    if choice.currency == "latency":
        assert choice.latency_tables is not None, choice
        where = LatencyTarget(backend="onnxruntime", batches=(choice.batch or 1,), cache=choice.latency_tables)
    return Budget(currency=choice.currency, share=choice.share, where=where)


def request_from_choice(choice: ReductionChoice) -> ReductionRequest:
    """The reduction as planning takes it."""
    return ReductionRequest(
        preset=choice.method.preset,
        method=choice.method.method,
        budget=_budget(choice.budget),
        auto_heads=choice.auto_heads,
        closed_loop=choice.closed_loop,
        allow_partial=choice.allow_partial,
        reads=choice.reads,
    )
