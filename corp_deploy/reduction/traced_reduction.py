"""All sites of a traced model reduced at once: what goes is proved to go alone, then the layers that read it change."""

from collections.abc import Mapping

import numpy as np
from torch import nn

from calib.inputs import InputSet
from corp_deploy.traced.finding.site import Index
from corp_deploy.traced.models.narrowing import narrowed, provable

from .rescaling import rescaled
from .traced_change import TracedReduced, tensors_of


def carried_out(
    model: nn.Module, new: Mapping[str, TracedReduced], images: InputSet | None
) -> tuple[nn.Module, dict[str, str]]:
    """The narrower model, and sites that had to be kept as they are, with the reason. `images`: where convolutions are
    rescaled on them.
    """
    narrower = {name: each for name, each in new.items() if each.is_narrower}
    kept, unreduced = provable(model, left_of(narrower))
    tensors = tensors_of({name: each for name, each in narrower.items() if name in kept})
    if images is not None:
        tensors = rescaled(model, kept, tensors, images)
    dtype = next(model.parameters()).dtype
    return narrowed(model, kept, {name: tensor.to(dtype) for name, tensor in tensors.items()}), unreduced


def left_of(narrower: Mapping[str, TracedReduced]) -> dict[str, Index]:
    """The groups that every site leaves of itself, and of others."""
    left = {name: each.kept_K.cpu().numpy() for name, each in narrower.items()}
    for name, groups in (item for each in narrower.values() for item in each.beside.items()):
        left[name] = np.intersect1d(left.get(name, groups), groups)
    return left
