"""The request of a reduction, its plan, and the record of both that is saved beside the model."""

import math
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
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import Reduction
from corp_deploy.spec.merging import Merging, cap_schedule, schedule_from_text, shares_from_text
from corp_deploy.spec.widths import Widths
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.class_names import CLASS_NAMES
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.input_sets import model_digest
from corp_deploy.store.model_config import FITTED
from corp_deploy.traced.models.mlp_merging import TokenMlp
from corp_deploy.traced.models.values import TracedValues
from ground.errors import BadInput
from ground.files import sha256_of_file
from perf.timing.laps import Plan

Backend = Literal["onnxruntime", "torch"]
PLAN = Plan(block_ms=20.0, min_rounds=8, noise_rounds=0, warm_up_limit_s=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """The conditions of a latency: backend, batch sizes, CPU threads, timing plan, and the cache of latency tables."""

    backend: Backend
    batches: tuple[int, ...]
    cache: Path
    threads: int | None = None
    plan: Plan = PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """The options of a reduction with the values that follow from them.

    `method` differs from that of the options if the model merges tokens. `where` has the conditions of latency, None if
    another cost counts.
    """

    options: ReduceOptions
    method: Method
    where: LatencyTarget | None = None

    @property
    def priced_in(self) -> Currency:
        return self.options.currency or ("macs" if self.where is None else "latency")

    def loop(self, moments: Moments) -> Loop | None:
        """Return the settings of an asymmetric closed loop, with the moments' split of images, None for any other."""
        if self.options.loop != "asymmetric":
            return None
        return Loop(reads=self.options.reads, half_ids=None if moments.half is None else moments.half.image_ids)


def build_request(options: ReduceOptions) -> ReductionRequest:
    tables = options.latency_tables
    return ReductionRequest(
        options=options,
        method=options.method_asked,
        where=None
        if tables is None
        else LatencyTarget(backend="onnxruntime", batches=(options.batch or 1,), cache=Path(tables)),
    )


def merging_from_choice(choice: MergedStatistics, model: nn.Module) -> Merging | None:
    """Return the token merging that the options ask for, or None if they ask for none.

    A single number stands for all blocks and is capped to the tokens that each block can merge; a share stands for as
    many tokens of every window of an MLP. Raises BadInput if the text is not a schedule of the model's blocks, or
    leaves the schedule to a budget.
    """
    text = choice.schedule
    if text is None:
        return None
    if choice.auto_merging:
        raise BadInput(
            "--merge-tokens auto needs a budget, for which it chooses the tokens that each block merges; give reduce "
            "--macs, or numbers of tokens: 12 in each block, grow:36"
        )
    if choice.merges == "mlp":
        mlps = traced_model.token_mlps(model)
        shares = shares_from_text(text, max(len(mlps), 1))
        return merging_of_schedule(choice, tuple(map(TokenMlp.count, mlps, shares)) or (0,))
    kinds = traced_model.token_kinds(model)
    schedule = schedule_from_text(text, traced_model.depth(model))
    if "," not in text:
        schedule = cap_schedule(schedule, choice.merge_how, len(kinds), len(kinds) - kinds.count("patch"))
    return merging_of_schedule(choice, schedule)


def merging_of_schedule(choice: MergedStatistics, schedule: tuple[int, ...]) -> Merging:
    return Merging(schedule=schedule, metric=choice.merge_metric, how=choice.merge_how, unmerged=choice.unmerged)


def apply_merging_choice(checkpoint: Checkpoint, choice: MergedStatistics) -> Checkpoint:
    """Return the checkpoint with the token merging that the options ask for, or unchanged if they ask for none."""
    return apply_merging(checkpoint, merging_from_choice(choice, checkpoint.model))


def apply_merging(checkpoint: Checkpoint, merging: Merging | None) -> Checkpoint:
    """Return the checkpoint with this token merging, or unchanged if a plan chose none."""
    if merging is None:
        return checkpoint
    return replace(checkpoint, model=traced_model.with_merging(checkpoint.model, merging))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAllocation:
    """An allocation by name: the share of the cost that stays, and the relative error as predicted and as measured.

    `measured_error` is that of all inputs together, `median_error` that of the median input.
    """

    name: str
    share: float
    predicted_error: float
    measured_error: float
    median_error: float

    @property
    def error(self) -> float:
        """The error by which plans are compared: the geometric mean of both."""
        return math.sqrt(self.measured_error * self.median_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One pass or the closed loop: relative output error on images outside its fit, time, and whether it is kept."""

    name: str
    error: float
    seconds: float
    kept: bool = False

    def describe(self) -> str:
        return f"{self.name} errs {self.error:.4f} ({self.seconds:,.1f} s)"


NAMED = 6  # sites that the sentence on sparing names


def sentences_on_spared(model: nn.Module, widths: Widths) -> tuple[str, ...]:
    """Return one sentence that names the sites that these widths don't reduce, or no sentence if there are none."""
    sites = [site for site in sites_of(model).every if site.width > 0]
    removed = [site for site in sites if isinstance(site, TracedValues) and widths.get(site.name, site.width) == 0]
    gone = {name for site in removed for name in site.queries_gone}
    unreduced = [
        site.name for site in sites if widths.get(site.name, site.width) == site.width and site.name not in gone
    ]
    if not unreduced:
        return ()
    named = f"{', '.join(unreduced[:NAMED])}{', ...' if len(unreduced) > NAMED else ''}"
    return (f"kept whole: {len(unreduced)} of {len(sites)} sites, which lose more than they save ({named})",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthPlan:
    """The chosen method and widths (None: the method's uniform sparsities), with a sentence on each decision.

    `predicted_speedup` is dense over reduced latency, for budgets of latency. `ways` are the chosen allocation and its
    alternatives, `eliminations` the orders of removal already computed, and `metrics` the output metrics of layers (see
    curvature.py). `stages` are the attempts to carry the plan out. `within` is the search for a limit, as JSON values;
    `merging` is the token merging that a budget chose.
    """

    method: Method
    widths: Widths | None
    decisions: tuple[str, ...]
    predicted_speedup: float | None = None
    ways: tuple[ProbedAllocation, ...] = ()
    eliminations: Mapping[str, Elimination] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    stages: tuple[Attempt, ...] = ()
    within: Mapping[str, Any] | None = None
    merging: Merging | None = None


def build_reduction_record(reduction: Reduction, planned: WidthPlan) -> dict[str, Any]:
    merging = merging_record(reduction.model)
    return reduction.as_json() | {
        "decided": [*planned.decisions, *reduction.decisions],
        "ways": [asdict(way) for way in planned.ways],
        **({"stages": [asdict(stage) for stage in planned.stages]} if planned.stages else {}),
        **({} if planned.within is None else {"within": dict(planned.within)}),
        **({} if merging is None else {"merging": merging.as_json()}),
    }


def _used_fingerprints(dense: Checkpoint, moments: Moments, looked_at: Sequence[InputSet | None]) -> Fingerprints:
    """Return the fingerprints of all inputs that shaped the model, an earlier reduction's included, each once."""
    earlier = fitted_of_lineage(dense.lineage, where="the dense model")
    own = Fingerprints() if earlier is None else earlier.fingerprints
    fingerprints = Fingerprints.concatenated([moments.fingerprints, own])
    others = [each.ids[~torch.isin(each.ids, fingerprints.ids)].unique() for each in looked_at if each is not None]
    return Fingerprints.concatenated([fingerprints, *(Fingerprints(ids=ids) for ids in others)])


def build_reduced_checkpoint(
    dense: Checkpoint,
    reduction: Reduction,
    planned: WidthPlan,
    preset: str,
    moments: Moments,
    moments_file: Path,
    held_out: Moments | None = None,
    looked_at: Sequence[InputSet | None] = (),
) -> Checkpoint:
    """Return the reduced checkpoint with its lineage.

    `looked_at` are the inputs, besides those of the moments, by which the model was fitted or chosen.
    """
    lineage = {
        "dense": model_digest(dense.model),
        "moments": sha256_of_file(moments_file),
        "images": moments.lineage["images"],
        "preset": preset,
        "reduction": build_reduction_record(reduction, planned),
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
