"""From the attention moments and the method to the maps of queries, keys and values at one site. Knows no model.

Legend: H heads, D dense head width, R reduced head width, C = H D, O outputs of the projection.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra import queries_keys, scores, values
from corp_deploy.algebra.image_system import ImageSystem
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.ridges import RidgeChoice, chosen_ridge, ridges_from
from corp_deploy.algebra.values import ValueRecovery

from .logits import logit_error, logit_scale, qk_scores, refuse_other_ranking, refuse_uncovered, system_of
from .method import Method
from .rope_planes import recovered_planes


@dataclass(frozen=True, slots=True, kw_only=True)
class QkAtSite:
    """A recovery and, per head, the dense logit energy in the unit of its residual; `ridge`: how strong it was chosen,
    where halves of the images chose.
    """

    recovery: QkRecovery
    energy_H: Tensor
    ridge: RidgeChoice | None = None


Splits = tuple[HeadMoments, HeadMoments]
Recover = Callable[[str, HeadMoments, Method, Tensor, int], QkRecovery]


def qk_at_site(
    site: str,
    moments: HeadMoments,
    method: Method,
    rows_XI: Tensor,
    width: int,
    splits: Splits | None = None,
    *,
    in_planes: bool = False,
    grouped: int = 1,
    scores_HD: Tensor | None = None,
) -> QkAtSite:
    """Apply the chosen Q/K recovery at one head width. `splits` of the images choose the ridge that pulls CORP's maps
    (`logit`) toward the dimensions as they are; `in_planes`: they go by whole planes, alike in `grouped` heads in turn
    that share keys; `scores_HD`, where known, rank them. Raises BadInput when the moments lack what the recovery needs.
    """
    recover: Recover = partial(recovered_planes, grouped=grouped) if in_planes else _recovered_qk
    assert in_planes or grouped == 1, site
    if scores_HD is None:
        scores_HD = qk_scores(moments, method, rows_XI, grouped=grouped)
    ridge = None
    if splits is not None and method.qk_recovery == "logit" and width < moments.energy_HD.shape[1]:
        ridge = _qk_ridge(recover, site, splits, method, scores_HD, width)
        method = replace(method, ridge_rel=ridge.strength_whole)
    recovery = recover(site, moments, method, scores_HD, width)
    return QkAtSite(recovery=recovery, energy_H=logit_scale(site, moments, method), ridge=ridge)


def kept_qk(moments: HeadMoments) -> QkRecovery:
    """Queries and keys as they are, where nothing may be done to them."""
    heads, dense, _ = moments.q_second_HDD.shape
    every_HR = torch.arange(dense, device=moments.q_second_HDD.device).expand(heads, dense)
    return queries_keys.select(every_HR, q_second_HDD=moments.q_second_HDD, k_second_HDD=moments.k_centred_HDD)


def _kept_inside(site: str, system: ImageSystem, scores_HD: Tensor, width: int, align: int) -> Tensor:
    """The best dimensions among those that the system covers; all of them where it was taken for this very width."""
    refuse_uncovered(site, system, width, align)
    best_HR = scores.kept_from_scores(scores_HD.gather(1, system.covered_HS), width)
    return system.covered_HS.gather(1, best_HR)


def _qk_ridge(
    recover: Recover, site: str, splits: Splits, method: Method, scores_HD: Tensor, width: int
) -> RidgeChoice:
    """The strength whose maps of either half lose least of the logits of the other."""

    def share_lost(recovery: QkRecovery, half: HeadMoments) -> float:
        energy = float(logit_scale(site, half, method).sum())
        error_H = logit_error(site, half, method, recovery.q_map_HRD, recovery.k_map_HRD)
        return float(error_H.sum()) / energy if energy > 0.0 else 0.0

    def fit(half: HeadMoments, strength: float) -> QkRecovery:
        return recover(site, half, replace(method, ridge_rel=strength), scores_HD, width)

    return chosen_ridge(splits, ridges_from(method.ridge_rel), fit, share_lost)


def _recovered_qk(site: str, moments: HeadMoments, method: Method, scores_HD: Tensor, width: int) -> QkRecovery:
    q_second_HDD, k_centred_HDD = moments.q_second_HDD, moments.k_centred_HDD
    if method.qk_recovery == "lowrank":
        return queries_keys.lowrank(q_second_HDD, k_centred_HDD, width)
    if method.qk_recovery == "logit":
        system = system_of(site, moments)
        if system.covered_HS.shape[1] < width == system.head_dim:
            return kept_qk(moments)  # nothing is missing at full width, whatever the system leaves out
        kept_HR = _kept_inside(site, system, scores_HD, width, method.align_head)
        if method.qk_selection != "energy" and not kept_HR.equal(scores.kept_from_scores(scores_HD, width)):
            refuse_other_ranking(site, method)
        return queries_keys.logit(system, kept_HR, ridge_rel=method.ridge_rel)
    kept_HR = scores.kept_from_scores(scores_HD, width)
    if method.qk_recovery == "select":
        return queries_keys.select(kept_HR, q_second_HDD=q_second_HDD, k_second_HDD=k_centred_HDD)
    assert method.qk_recovery == "logit-v1", method.qk_recovery
    return queries_keys.logit_v1(q_second_HDD, moments.k_second_HDD, kept_HR, ridge_rel=method.ridge_rel)


class HeadOutputs(Protocol):
    """Mean, second moment and covariance of what all heads give, side by side."""

    @property
    def z_mean_C(self) -> Tensor: ...

    @property
    def z_second_CC(self) -> Tensor: ...

    @property
    def z_covariance_CC(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesAtSite:
    """A recovery; `ridge`: how strong it was chosen, where halves of the images chose."""

    recovery: ValueRecovery
    ridge: RidgeChoice | None = None


def _value_ridge(
    splits: tuple[HeadOutputs, HeadOutputs],
    least: float,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    heads: int,
    width: int,
) -> RidgeChoice:
    """The strength whose values and projections of either half lose least on the other."""

    def share_lost(recovery: ValueRecovery, half: HeadOutputs) -> float:
        energy = output_energy(half, weight_OC)
        return error_of(recovery, weight_OC, bias_O, half) / energy if energy > 0.0 else 0.0

    def fit(half: HeadOutputs, strength: float) -> ValueRecovery:
        return values.lowrank(half.z_mean_C, half.z_second_CC, weight_OC, bias_O, heads, width, ridge_rel=strength)

    return chosen_ridge(splits, ridges_from(least), fit, share_lost)


def values_at_site(
    moments: HeadOutputs,
    method: Method,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    heads: int,
    width: int,
    splits: tuple[HeadOutputs, HeadOutputs] | None = None,
) -> ValuesAtSite:
    """The values and the output projection at one width per head. `splits` of the images choose the ridge of the joint
    refit, which pulls toward the best projection of each head alone.
    """
    dense = weight_OC.shape[1] // heads
    if width == dense:
        return ValuesAtSite(recovery=values.keep(weight_OC, bias_O, heads))
    assert method.value_recovery == "lowrank", method.value_recovery
    ridge, ridge_rel = None, method.ridge_rel
    if splits is not None and width < dense:
        ridge = _value_ridge(splits, ridge_rel, weight_OC, bias_O, heads, width)
        ridge_rel = ridge.strength_whole
    recovery = values.lowrank(
        moments.z_mean_C, moments.z_second_CC, weight_OC, bias_O, heads, width, ridge_rel=ridge_rel
    )
    return ValuesAtSite(recovery=recovery, ridge=ridge)


def output_energy(moments: HeadOutputs, weight_OC: Tensor) -> float:
    """Variance of the dense projection's output: tr(W C W')."""
    return variance(weight_OC, moments.z_covariance_CC)


def error_of(recovery: ValueRecovery, weight_OC: Tensor, bias_O: Tensor | None, moments: HeadOutputs) -> float:
    """E||y - y'||^2 of new values and projection on any moments of the dense z."""
    bias_change_O = -recovery.bias_O if bias_O is None else bias_O - recovery.bias_O
    return output_error(moments.z_mean_C, moments.z_second_CC, weight_OC - recovery.as_dense_OC, bias_change_O)
