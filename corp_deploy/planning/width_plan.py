"""What a reduction is to be, settled before it is done, what it was weighed against, and the record of it that is kept
beside the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calib.fingerprints import Fingerprints
from calib.inputs import InputSet
from calib.moments import Moments
from calib.store import load as load_moments
from corp_deploy.families.family import sites_of
from corp_deploy.families.inspection import merging_record
from corp_deploy.families.widths import Widths, is_empty
from corp_deploy.reduction.kind import Order
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import Reduction
from corp_deploy.store.checkpoint import Checkpoint, fitted_of_lineage
from corp_deploy.store.inputs import model_digest
from corp_deploy.store.model_config import FITTED
from corp_deploy.traced.models.merging import Merging
from ground.files import sha256_of_file


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
    unreduced = [site.name for site in sites if widths.get(site.name, site.width) == site.width]
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
    eliminations: Mapping[str, Order] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    within: Mapping[str, Any] | None = None
    merging: Merging | None = None


def record_of_reduction(reduction: Reduction, planned: WidthPlan) -> dict[str, Any]:
    """The reduction and what was decided for it, as JSON values."""
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
    earlier = fitted_of_lineage(dense.lineage, where="the dense model") or Fingerprints()
    fingerprints = Fingerprints.concatenated([moments.fingerprints, earlier])
    others = [each.ids[~torch.isin(each.ids, fingerprints.ids)].unique() for each in looked_at if each is not None]
    return Fingerprints.concatenated([fingerprints, *(Fingerprints(ids=ids) for ids in others)])


def reduced_checkpoint(
    dense: Checkpoint,
    reduction: Reduction,
    planned: WidthPlan,
    preset: str,
    moments: Path,
    held_out: Moments | None,
    looked_at: Sequence[InputSet | None] = (),
) -> Checkpoint:
    """With what led to it; `looked_at`: the inputs beside the moments that it was fitted or chosen by."""
    fitted = load_moments(moments)
    lineage = {
        "dense": model_digest(dense.model),
        "moments": sha256_of_file(moments),
        "images": fitted.lineage["images"],
        "preset": preset,
        "reduction": record_of_reduction(reduction, planned),
    }
    fingerprints = _used_fingerprints(dense, fitted, looked_at)
    if len(fingerprints):
        lineage[FITTED] = fingerprints.as_json()
    if "source" in dense.lineage:
        lineage["source"] = dense.lineage["source"]
    if held_out is not None:
        lineage["held_out_images"] = held_out.lineage["images"]
    if reduction.polish is not None:
        lineage["polish"] = "gradients" if reduction.polish["gradients"] else "least squares"
    return Checkpoint(
        model=reduction.model,
        architecture=dense.architecture,
        lineage=lineage,
        unread=dense.unread,
        sparsity={} if reduction.sparsity is None else reduction.sparsity.patterns,
    )
