"""What the layers that read a traced site become on the groups that stay, and how far from what they were.

Legend: as in traced_reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from corp_deploy.algebra import channels, patches
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.patches import columns
from corp_deploy.algebra.quadratic import output_error
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.algebra.shares import mean_from_kept
from ground.errors import BadInput

from .traced_reads import ReaderStats

_OF_VECTORS: Mapping[str, Callable[..., ChannelRecovery]] = {
    "none": channels.none,
    "bias": channels.bias,
    "gram": channels.gram,
    "affine": channels.affine,
    "affine-v1": channels.affine_v1,
    "im2col": channels.affine,
}
_OF_MAPS: Mapping[str, Callable[..., ChannelRecovery]] = {
    **patches.RECOVERIES,
    "affine-v1": patches.RECOVERIES["affine"],
}


def recovered(read: ReaderStats, recovery: str, kept_K: Tensor, *, ridge_rel: float) -> ChannelRecovery:
    """What one layer becomes on the groups that stay. Raises BadInput for those that have no patches."""
    if read.target is not None:
        return _fitted(read, recovery, kept_K, ridge_rel)
    stats, kept_k = read.stats, read.kept_k(kept_K)
    if read.is_of_maps:
        return _OF_MAPS[recovery](stats, read.weight_OU, read.bias_O, kept_k, ridge_rel=ridge_rel)
    recover: Any = _OF_VECTORS[recovery]
    new: ChannelRecovery = recover(
        stats.mean_U, stats.second_UU, read.weight_OU, read.bias_O, kept_k, ridge_rel=ridge_rel
    )
    return new


def without_patches(chosen: int, every: int, width: int, recovery: str) -> BadInput:
    """Why so many channels can't be kept by this repair."""
    return BadInput(
        f"the moments have patches of {chosen} of {every} channels (calibrate --patch-memory), of which preset best "
        f"can keep {chosen} at most, or all; got {width} by recovery {recovery}; calibrate with more memory, or remove "
        "more there"
    )


def _fitted(read: ReaderStats, recovery: str, kept_K: Tensor, ridge_rel: float) -> ChannelRecovery:
    """Columns of channels with patches to what the layer gave, toward themselves."""
    assert read.target is not None, read.reading.name
    kept_U, parts = columns(read.kept_k(kept_K), read.stats.taps), len(read.reading.portions)
    if read.has_all_patches(kept_K):
        return channels.unchanged(read.weight_OU[:, kept_U], read.bias_O)
    if recovery != "im2col" or len(kept_U) * parts != len(kept_K) * read.columns:
        every = len(read.reading.columns_GM)
        raise without_patches(len(read.groups_C) * parts, every, len(kept_K), recovery)
    weight_OK, target = read.weight_OU[:, kept_U], read.target.of(kept_U)
    refit = refit_toward(weight_OK, target, strength=ridge_rel)
    return ChannelRecovery(
        weight_OK=refit.weight_OK,
        bias_O=refit.bias_O,
        residual=refit.residual,
        residual_uncompensated=target.error(weight_OK, read.bias_O),
        r2=1.0 - refit.residual / refit.residual_prior if refit.residual_prior > 0.0 else 1.0,
        condition=refit.condition,
        ridge=refit.ridge,
    )


def mean_of_kept(read: ReaderStats, kept_K: Tensor) -> ChannelRecovery:
    """Of a mean over all groups that they are divided by, told of those that stay alone."""
    kept_k = read.kept_k(kept_K)
    weight_K = mean_from_kept(read.stats.second_UU, read.weight_OU[0], kept_k)
    own = recovered(read, "none", kept_K, ridge_rel=0.0)
    return replace(own, weight_OK=weight_K[None], bias_O=read.bias_O)


def error_of(recovery: ChannelRecovery, kept_K: Tensor, other: ReaderStats) -> float:
    """E||y - y'||^2 of a recovered layer on other statistics of what it read. Raises BadInput where those have no
    patches of what is kept.
    """
    if other.target is not None and other.has_all_patches(kept_K):
        return 0.0
    if recovery.weight_OK.shape[1] != len(other.kept_k(kept_K)) * other.stats.taps:
        raise BadInput(
            f"{other.reading.name}: the moments that judge it have patches of other channels; calibrate both with the "
            "same --patch-memory"
        )
    weight_OU = other.as_dense_OU(recovery, kept_K)
    if other.target is not None:
        return other.target.error(weight_OU, recovery.bias_O)
    change_OU = other.weight_OU - weight_OU
    return output_error(other.stats.mean_U, other.stats.second_UU, change_OU, other.bias_O - recovery.bias_O)
