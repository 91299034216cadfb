"""Inputs held out of a polish, and the error of a model's outputs on them.

Legend: B inputs, N tokens, M tokens of the dense stream, C channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.inputs import InputSet, to_device
from corp_deploy.families import traced_model
from corp_deploy.reduction.streams import mean_of_sources
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.models.token_merging import Tokens
from ground.errors import BadInput

from .walk import AT_ONCE, joined_outputs, last_stream

_MOST = 64  # held-out inputs: more hardly make the error more certain, and each evaluation costs a pass
_LEAST = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSplit:
    fitted: InputSet
    held_out: InputSet


def _thinned(images: InputSet, rows: list[int]) -> InputSet:
    """Return the inputs at the positions `rows`; if they are more than 64, 64 of them, evenly spaced."""
    chosen = rows if len(rows) <= _MOST else [rows[index * len(rows) // _MOST] for index in range(_MOST)]
    return images.subset(chosen)


def split_inputs(
    images: InputSet, every: int, groups_B: Tensor | None = None, judges: InputSet | None = None
) -> ValidationSplit:
    """Split inputs into those to fit to and those held out: each `every`-th group, or the last one of fewer groups.

    `groups_B`: the group of each input; by default each is its own. Copies of held-out inputs are not fitted to. With
    `judges` these are held out and all `images` are fitted to. Of more than 64 held-out inputs 64, evenly spaced, stay.

    Raises:
        BadInput: no input is left to fit to or to hold out.
    """
    if judges is not None:
        return ValidationSplit(fitted=images, held_out=_thinned(judges, list(range(judges.count))))
    groups_B = torch.arange(images.count) if groups_B is None else groups_B
    groups = list(dict.fromkeys(groups_B.tolist()))
    judging = set(groups[every - 1 :: every] or groups[-1:])  # the last group where there are fewer
    rows = [position for position, group in enumerate(groups_B.tolist()) if group in judging]
    fitted = (~torch.isin(images.ids, images.ids[rows])).nonzero().squeeze(1).tolist()
    if not rows or not fitted:
        raise BadInput(
            f"polish: {images.count} {images.noun} in {len(groups_B.unique())} different groups; expected two or more, "
            "because some are held out to judge by"
        )
    return ValidationSplit(fitted=images.subset(fitted), held_out=_thinned(images, rows))


def stream_error(reduced: Tokens, dense_BMC: Tensor) -> Tensor:
    """Return the mean over tokens, without padding, of the squared error relative to the dense token's square.

    A merged token is compared with the mean of the dense tokens that were merged into it, and counts as many times. The
    error is relative to each token's own norm, because readers of a stream normalise each token, and the norms of a few
    tokens can be far larger than the rest.
    """
    reduced_BNC, weights_BN, sources_BM = reduced
    dense_BNC = dense_BMC if sources_BM is None else mean_of_sources(dense_BMC, sources_BM, reduced_BNC.shape[1])
    square_BN = dense_BNC.square().sum(dim=-1).clamp_min(_LEAST)
    error_BN = (reduced_BNC - dense_BNC).square().sum(dim=-1) / square_BN
    if weights_BN is None or weights_BN.shape != error_BN.shape:  # all of a pooled stream counts alike
        return error_BN.mean()
    return (error_BN * weights_BN).sum() / weights_BN.sum().clamp_min(1.0)


def relative_square(reduced: Tensor, dense: Tensor) -> Tensor:
    """Return the squared error of outputs [B,...], each input's relative to its own square, mean over the inputs."""
    square_B = dense.reshape(len(dense), -1).square().sum(dim=1).clamp_min(_LEAST)
    return ((reduced - dense).reshape(len(dense), -1).square().sum(dim=1) / square_B).mean()


@torch.no_grad()
def held_out_error(dense: nn.Module, reduced: nn.Module, inputs: InputSet, *, reads_all: bool) -> float:
    """Return the relative error of the reduced model's outputs: the root of relative_square over all inputs.

    With `reads_all`, for models of which users read all tokens of the last stream, the result is the root mean square
    of the outputs' error and that stream's.
    """
    total, count = 0.0, 0
    for batch in inputs.batches(AT_ONCE):
        here = to_device(batch, device_of(dense))
        x_BNC, weights_BN = traced_model.first_stream(dense, here), traced_model.token_weights(dense, here)
        exact, found = (last_stream(model, x_BNC, weights_BN) for model in (dense, reduced))
        error = relative_square(joined_outputs(reduced, found, here), joined_outputs(dense, exact, here))
        if reads_all:
            error = (error + stream_error(found, exact.x)) / 2.0
        total, count = total + float(error) * len(x_BNC), count + len(x_BNC)
    return math.sqrt(total / count)
