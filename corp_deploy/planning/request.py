"""What is asked of a reduction, and the merging of tokens in it; what is settled before it is done and was weighed
against; and the record of both that is kept beside the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from calib.fingerprints import Fingerprints
from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.inspection import merging_record
from corp_deploy.invocation.budget_choice import Currency
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import Reduction
from corp_deploy.spec.merging import Merging, cap_schedule, schedule_from_text
from corp_deploy.spec.widths import Widths, is_empty
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.class_names import CLASS_NAMES
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.input_sets import model_digest
from corp_deploy.store.model_config import FITTED
from corp_deploy.traced.models.values import TracedValues
from ground.errors import BadInput
from ground.files import sha256_of_file
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
        return self.options.currency or ("macs" if self.where is None else "latency")

    def loop(self, moments: Moments) -> Loop | None:
        """The closed loop that fits to the dense stream, None for another or none; it splits images as moments do."""
        if self.options.loop != "asymmetric":
            return None
        return Loop(reads=self.options.reads, half_ids=None if moments.half is None else moments.half.image_ids)


def request_of(options: ReduceOptions, *, method: Method | None = None) -> ReductionRequest:
    """The request that options make; `method` in place of theirs."""
    tables = options.latency_tables
    return ReductionRequest(
        options=options,
        method=options.method_asked if method is None else method,
        where=None
        if tables is None
        else LatencyTarget(backend="onnxruntime", batches=(options.batch or 1,), cache=Path(tables)),
        polish=options.polish_options,
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
        schedule = cap_schedule(schedule, choice.merge_how, len(kinds), len(kinds) - kinds.count("patch"))
    return merging_of_schedule(choice, schedule)


def merging_of_schedule(choice: MergedStatistics, schedule: tuple[int, ...]) -> Merging:
    return Merging(schedule=schedule, metric=choice.merge_metric, how=choice.merge_how, unmerged=choice.unmerged)


def merging_checkpoint(checkpoint: Checkpoint, choice: MergedStatistics) -> Checkpoint:
    """The checkpoint with a model that merges as asked for; itself where nothing was asked for."""
    return merging_as_planned(checkpoint, merging_from_choice(choice, checkpoint.model))


def merging_as_planned(checkpoint: Checkpoint, merging: Merging | None) -> Checkpoint:
    """The checkpoint with a model that merges as a plan has settled; itself where the plan left that alone."""
    if merging is None:
        return checkpoint
    return replace(checkpoint, model=traced_model.with_merging(checkpoint.model, merging))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAllocation:
    """A budget's allocation: the share that stays, the relative error predicted, and the one found by the probe."""

    name: str
    share: float
    predicted_error: float
    measured_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A way to carry out a plan: its relative output error on images that it wasn't fitted to, and what it took."""

    name: str
    error: float
    seconds: float
    kept: bool = False

    def describe(self) -> str:
        return f"{self.name} errs {self.error:.4f} ({self.seconds:,.1f} s)"


NAMED = 6


def left_alone(model: nn.Module, widths: Widths) -> tuple[str, ...]:
    """A sentence on the sites that a budget spares, none where it spares none."""
    sites = [site for site in sites_of(model).every if not is_empty(site.width)]
    removed = [site for site in sites if isinstance(site, TracedValues) and is_empty(widths.get(site.name, site.width))]
    gone = {name for site in removed for name in site.queries_gone}
    unreduced = [
        site.name for site in sites if widths.get(site.name, site.width) == site.width and site.name not in gone
    ]
    if not unreduced:
        return ()
    named = f"{', '.join(unreduced[:NAMED])}{', ...' if len(unreduced) > NAMED else ''}"
    return (f"left alone: {len(unreduced)} of {len(sites)} sites would lose more than narrower ones save ({named})",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthPlan:
    """Method and widths settled (None: uniform), with a sentence on each thing that was decided.

    `ways`: the one taken and those it was weighed against. `eliminations`: work that the reduction need not repeat.
    `metrics`: what was learned of layers' outputs, see Moments. `stages`: what was tried to carry it out.
    `within`: what was tried for a limit, as JSON values. `merging`: what a budget chose to merge away.
    """

    method: Method
    widths: Widths | None
    decisions: tuple[str, ...]
    predicted_speedup: float | None = None
    ways: tuple[ProbedAllocation, ...] = ()
    eliminations: Mapping[str, Elimination] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    within: Mapping[str, Any] | None = None
    merging: Merging | None = None


def record_of_reduction(reduction: Reduction, planned: WidthPlan) -> dict[str, Any]:
    merging = merging_record(reduction.model)
    return reduction.as_json() | {
        "decided": [*planned.decisions, *reduction.decisions],
        "ways": [asdict(way) for way in planned.ways],
        **({"stages": [asdict(stage) for stage in planned.stages]} if planned.stages else {}),
        **({} if planned.within is None else {"within": dict(planned.within)}),
        **({} if merging is None else {"merging": merging.as_json()}),
    }


def _used_fingerprints(dense: Checkpoint, moments: Moments, looked_at: Sequence[InputSet | None]) -> Fingerprints:
    """All inputs that had a part in the model, those of an earlier reduction too, each once."""
    earlier = fitted_of_lineage(dense.lineage, where="the dense model")
    own = Fingerprints() if earlier is None else earlier.fingerprints
    fingerprints = Fingerprints.concatenated([moments.fingerprints, own])
    others = [each.ids[~torch.isin(each.ids, fingerprints.ids)].unique() for each in looked_at if each is not None]
    return Fingerprints.concatenated([fingerprints, *(Fingerprints(ids=ids) for ids in others)])


def reduced_checkpoint(
    dense: Checkpoint,
    reduction: Reduction,
    planned: WidthPlan,
    preset: str,
    moments: Moments,
    moments_file: Path,
    held_out: Moments | None = None,
    looked_at: Sequence[InputSet | None] = (),
) -> Checkpoint:
    """With what led to it; `looked_at`: the inputs beside the moments that it was fitted or chosen by."""
    lineage = {
        "dense": model_digest(dense.model),
        "moments": sha256_of_file(moments_file),
        "images": moments.lineage["images"],
        "preset": preset,
        "reduction": record_of_reduction(reduction, planned),
    }
    fingerprints = _used_fingerprints(dense, moments, looked_at)
    if len(fingerprints):
        lineage[FITTED] = fingerprints.as_json()
    lineage |= {name: dense.lineage[name] for name in ("source", CLASS_NAMES) if name in dense.lineage}
    if held_out is not None:
        lineage["held_out_images"] = held_out.lineage["images"]
    if reduction.polish is not None:
        lineage["polish"] = "least squares"
    return Checkpoint(
        model=reduction.model,
        architecture=dense.architecture,
        lineage=lineage,
        unread=dense.unread,
        sparsity={} if reduction.sparsity is None else reduction.sparsity.patterns,
    )
