"""What led to a reduced model, as it is kept beside it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from calib.fingerprints import Fingerprints
from calib.inputs import InputSet
from calib.moments import Moments
from calib.store import load as load_moments
from corp_deploy.families.inspection import merging_record
from corp_deploy.reduction.model import Reduction
from corp_deploy.store.checkpoint import Checkpoint, fitted_of_lineage
from corp_deploy.store.inputs import model_digest
from corp_deploy.store.model_config import FITTED
from ground.files import sha256_of_file

from .width_plan import WidthPlan


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
    carried = fitted.lineage
    lineage = {
        "dense": model_digest(dense.model),
        "moments": sha256_of_file(moments),
        "images": carried["images"],
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
