"""What is planned, from how it was asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from calib.moments import Moments
from corp_deploy.invocation.budget_choice import MOST_CUT, BudgetChoice, Currency
from corp_deploy.invocation.limit import Limit
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.invocation.reduction import ReduceOptions, SaveAs
from corp_deploy.invocation.sparsity import SparseChoice
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import LoopName, Method
from corp_deploy.reduction.read_tokens import Reads

from .latency import LatencyTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A share of the dense model's MACs, parameters or latency that may stay, in (0, 1]; `where` tells latency's."""

    currency: Currency
    share: float
    where: LatencyTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRequest:
    """What the smallest model must stay within, and what it is to be least in; `where` tells latency's."""

    limit: Limit
    currency: Literal["macs", "latency"] = "macs"
    where: LatencyTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """A reduction as a user asks for it; a budget, a limit, `auto_heads`, the closed loop, a polish, merged
    channels and sparse weights need images.

    `most_cut` is how much of every site a budget may take, evenly; `allow_partial` takes a model of which less is
    removed than the sparsities ask for; `reads` are the tokens that a closed loop's last block is fitted to, see
    tokens_to_fit; `merging`: which tokens are merged away; `sparsity`: which weights become zero, last of all;
    `save_as`: what else the model is written as.
    """

    preset: str
    method: Method
    budget: Budget | None = None
    within: LimitRequest | None = None
    auto_heads: bool = False
    closed_loop: LoopName | None = None
    allow_partial: bool = False
    most_cut: float = MOST_CUT
    reads: Reads | None = None
    polish: PolishOptions | None = None
    merging: MergingChoice = field(default_factory=MergingChoice)
    sparsity: SparseChoice = field(default_factory=SparseChoice)
    save_as: SaveAs | None = None

    @property
    def needs_images(self) -> bool:
        planned = self.budget is not None or self.within is not None or self.auto_heads
        fitted = self.closed_loop is not None or self.polish is not None
        return (
            planned
            or fitted
            or self.method.merges
            or self.method.folds_heads
            or self.method.rescales
            or bool(self.sparsity.patterns)
        )


def loop_of(request: ReductionRequest, moments: Moments) -> Loop | None:
    """The closed loop that fits to the dense stream as it is asked for; None where none is. The moments' half, where
    they have one, is the loop's too.
    """
    if request.closed_loop != "asymmetric":
        return None
    return Loop(reads=request.reads, half_ids=None if moments.half is None else moments.half.image_ids)


def _target(choice: BudgetChoice) -> LatencyTarget | None:
    if choice.latency_tables is None:
        return None
    return LatencyTarget(backend="onnxruntime", batches=(choice.batch or 1,), cache=Path(choice.latency_tables))


def _budget(choice: BudgetChoice) -> Budget | None:
    if choice.currency is None:
        return None
    assert choice.share is not None, choice
    return Budget(currency=choice.currency, share=choice.share, where=_target(choice))


def _within(choice: BudgetChoice) -> LimitRequest | None:
    if choice.limit is None:
        return None
    where = _target(choice)
    return LimitRequest(limit=choice.limit, currency="macs" if where is None else "latency", where=where)


def request_from_choice(choice: ReduceOptions, *, seed: int = 0) -> ReductionRequest:
    """The reduction as planning takes it; the seed draws the order of a polish's inputs."""
    return ReductionRequest(
        preset=choice.preset,
        method=choice.method_asked,
        budget=_budget(choice),
        within=_within(choice),
        auto_heads=choice.auto_heads,
        closed_loop=choice.loop,
        allow_partial=choice.allow_partial,
        most_cut=choice.most_cut,
        reads=choice.reads,
        polish=choice.polish_options(seed=seed),
        merging=choice.merging,
        sparsity=choice.sparsity,
        save_as=choice.save_as,
    )
