"""What can't go: what stays, what holds it, and all that something which stays holds."""

import torch
from torch import Tensor

from .flow import Flow


def stuck(flow: Flow) -> Tensor:
    """Whether each label [labels] names a group that can't go."""
    stays = flow.groups.reason_of(torch.arange(flow.groups.count)) > 0
    held = flow.held()
    while True:
        before = stays.clone()
        for outer, inner in held:
            stays[outer[stays[inner]]] = True
            stays[_only(outer, inner, stays)] = True
        if torch.equal(before, stays):
            return stays


def holders(flow: Flow) -> Tensor:
    """Whether each label [labels] names a group that holds others."""
    holds = torch.zeros(flow.groups.count, dtype=torch.bool)
    for outer, _ in flow.held():
        holds[outer] = True
    return holds


def _only(outer: Tensor, inner: Tensor, stays: Tensor) -> Tensor:
    """Groups that are all that something which stays holds."""
    pairs = torch.unique(torch.stack((outer, inner), 1), dim=0)
    count = torch.zeros(len(stays), dtype=torch.long).scatter_add_(
        0, pairs[:, 0], torch.ones(len(pairs), dtype=torch.long)
    )
    only: Tensor = pairs[(count[pairs[:, 0]] == 1) & stays[pairs[:, 0]], 1]
    return only
