"""What is planned: the options of a reduction, what follows from them, and the merging of tokens that they request."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.invocation.budget_choice import Currency
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import Merging, capped, schedule_from_text
from ground.errors import BadInput
from perf.timing.laps import Plan

Backend = Literal["onnxruntime", "torch"]
PLAN = Plan(block_ms=20.0, min_rounds=8, noise_rounds=0, warm_up_limit_s=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """What latency means here: the backend, the batch sizes, CPU threads, and where tables are kept."""

    backend: Backend
    batches: tuple[int, ...]
    cache: Path
    threads: int | None = None
    plan: Plan = PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """The options of a reduction; its `method`, which is not quite theirs where tokens merge; `where`: on what latency
    is measured, None where another cost counts; `polish`: how the reduced model is polished.
    """

    options: ReduceOptions
    method: Method
    where: LatencyTarget | None = None
    polish: PolishOptions | None = None

    @property
    def priced_in(self) -> Currency:
        """The cost that a budget is of, or that a limit makes least."""
        return self.options.currency or ("macs" if self.where is None else "latency")

    def loop(self, moments: Moments) -> Loop | None:
        """The closed loop that fits to the dense stream, None for another or none; it splits images as moments do."""
        if self.options.loop != "asymmetric":
            return None
        return Loop(reads=self.options.reads, half_ids=None if moments.half is None else moments.half.image_ids)


def request_of(options: ReduceOptions, *, method: Method | None = None, seed: int = 0) -> ReductionRequest:
    """The request that options make; `method` in place of theirs. The seed draws the order of a polish's inputs."""
    tables = options.latency_tables
    return ReductionRequest(
        options=options,
        method=options.method_asked if method is None else method,
        where=None
        if tables is None
        else LatencyTarget(backend="onnxruntime", batches=(options.batch or 1,), cache=Path(tables)),
        polish=options.polish_options(seed=seed),
    )


def merging_from_choice(choice: MergedStatistics, model: nn.Module) -> Merging | None:
    """What a model merges as it was asked for, None where nothing was. Where one number stands for all blocks, a block
    merges no more than it can. Raises BadInput for a text that is no schedule of its blocks.
    """
    text = choice.schedule
    if text is None:
        return None
    if choice.auto_merging:
        raise BadInput(
            "--merge-tokens auto chooses for a budget what each block merges away; give reduce --macs with it, or "
            "say how many tokens: 12 in each block, grow:36"
        )
    kinds = traced_model.token_kinds(model)
    schedule = schedule_from_text(text, traced_model.depth(model))
    if "," not in text:
        schedule = capped(schedule, choice.merge_how, len(kinds), len(kinds) - kinds.count("patch"))
    return merging_of_schedule(choice, schedule)


def merging_of_schedule(choice: MergedStatistics, schedule: tuple[int, ...]) -> Merging:
    """All but the schedule as it was asked for."""
    return Merging(schedule=schedule, metric=choice.merge_metric, how=choice.merge_how, unmerged=choice.unmerged)


def merging_checkpoint(checkpoint: Checkpoint, choice: MergedStatistics) -> Checkpoint:
    """The checkpoint with a model that merges as asked for; itself where nothing was asked for."""
    return merging_as_planned(checkpoint, merging_from_choice(choice, checkpoint.model))


def merging_as_planned(checkpoint: Checkpoint, merging: Merging | None) -> Checkpoint:
    """The checkpoint with a model that merges as a plan has settled; itself where the plan left that alone."""
    if merging is None:
        return checkpoint
    return replace(checkpoint, model=traced_model.with_merging(checkpoint.model, merging))
