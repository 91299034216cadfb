"""From the attention moments and the method to the maps of queries, keys and values at one site. Knows no model.

Legend: H heads, D dense head width, R reduced head width, C = H D, O outputs of the projection.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra import queries_keys, scores, values
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.image_system import ImageSystem
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.ridges import RidgeChoice, chosen_ridge, ridges_from
from corp_deploy.algebra.rotation import rotated_back, rotated_maps
from corp_deploy.algebra.values import ValueRecovery

from .logits import logit_error, logit_scale, refuse_other_ranking, refuse_uncovered, system_of
from .method import Method
from .report import HeldOut, SiteReport
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
    scores_HD: Tensor,
    width: int,
    splits: Splits | None = None,
    *,
    in_planes: bool = False,
    grouped: int = 1,
) -> QkAtSite:
    """Apply the chosen Q/K recovery at one head width, to dimensions that `scores_HD` rank. `splits` of the images
    choose the ridge that pulls CORP's maps (`logit`) toward the dimensions as they are; `in_planes`: they go by whole
    planes, alike in `grouped` heads in turn that share keys. Raises BadInput when the moments lack what it needs.
    """
    recover: Recover = partial(recovered_planes, grouped=grouped) if in_planes else _recovered_qk
    assert in_planes or grouped == 1, site
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """What all heads give, side by side, with the projection that reads it."""

    z_mean_C: Tensor
    z_second_CC: Tensor
    weight_OC: Tensor
    bias_O: Tensor

    @property
    def z_covariance_CC(self) -> Tensor:
        return self.z_second_CC - torch.outer(self.z_mean_C, self.z_mean_C)

    @property
    def energy(self) -> float:
        """Variance of the dense projection's output: tr(W C W')."""
        return variance(self.weight_OC, self.z_covariance_CC)

    def error(self, weight_OC: Tensor, bias_O: Tensor) -> float:
        """E||y - y'||^2 of another projection."""
        change_OC, change_O = self.weight_OC - weight_OC, self.bias_O - bias_O
        return output_error(self.z_mean_C, self.z_second_CC, change_OC, change_O)

    def judged(self, weight_OC: Tensor, bias_O: Tensor) -> HeldOut:
        """The same beside the output's variance."""
        return HeldOut(energy=self.energy, error=self.error(weight_OC, bias_O))

    def at(self, kept_K: Tensor, recovery: ChannelRecovery) -> "HeadOutputs":
        """Of these columns, which the projection reads as recovered."""
        return HeadOutputs(
            z_mean_C=self.z_mean_C[kept_K],
            z_second_CC=self.z_second_CC[kept_K[:, None], kept_K],
            weight_OC=recovery.weight_OK,
            bias_O=recovery.bias_O,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesAtSite:
    """A recovery; `ridge`: how strong it was chosen, where halves of the images chose."""

    recovery: ValueRecovery
    ridge: RidgeChoice | None = None


def values_at_site(
    own: HeadOutputs,
    method: Method,
    heads: int,
    width: int,
    splits: tuple[HeadOutputs, HeadOutputs] | None = None,
) -> ValuesAtSite:
    """The values and the output projection at one width per head. `splits` of the images choose the ridge of the joint
    refit, which pulls toward the best projection of each head alone: that whose values and projections of either half
    lose least on the other.
    """
    if width == own.weight_OC.shape[1] // heads:
        return ValuesAtSite(recovery=values.keep(own.weight_OC, own.bias_O, heads))
    assert method.value_recovery == "lowrank", method.value_recovery

    def fit(of: HeadOutputs, strength: float) -> ValueRecovery:
        projection = own.weight_OC, own.bias_O
        return values.lowrank(of.z_mean_C, of.z_second_CC, *projection, heads, width, ridge_rel=strength)

    def share_lost(recovery: ValueRecovery, half: HeadOutputs) -> float:
        return half.judged(recovery.as_dense_OC, recovery.bias_O).share

    ridge = None if splits is None else chosen_ridge(splits, ridges_from(method.ridge_rel), fit, share_lost)
    return ValuesAtSite(recovery=fit(own, method.ridge_rel if ridge is None else ridge.strength_whole), ridge=ridge)


def _qk_held_out(site: str, recovery: QkRecovery, held_out: HeadMoments, method: Method) -> HeldOut:
    error_H = logit_error(site, held_out, method, recovery.q_map_HRD, recovery.k_map_HRD)
    energy_H = logit_scale(site, held_out, method)
    return HeldOut(energy=float(energy_H.sum()), error=float(error_H.sum()))


def qk_report(
    site: str, dense: int, at_site: QkAtSite, method: Method, width: int, held_out: HeadMoments | None
) -> SiteReport:
    """What happened to queries and keys that had the width `dense` per head."""
    recovery = at_site.recovery
    return SiteReport(
        site=site,
        part="qk",
        width_dense=dense,
        width_asked=dense * method.attention_kept,
        width=width,
        energy=float(at_site.energy_H.sum()),
        error_uncompensated=float(recovery.residual_uncompensated_H.sum()),
        error=float(recovery.residual_H.sum()),
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        ridge_fit=at_site.ridge,
        held_out=None if held_out is None else _qk_held_out(site, recovery, held_out, method),
    )


def layer_report(
    site: str,
    part: str,
    widths: tuple[int, float, int],
    recovery: ChannelRecovery,
    energy: float,
    held_out: HeldOut | None,
    ridge: RidgeChoice | None = None,
) -> SiteReport:
    """Of what one layer reads. `widths`: the dense one, that asked for and that left; `ridge`: chosen by halves of the
    images.
    """
    dense, asked, left = widths
    return SiteReport(
        site=site,
        part=part,
        width_dense=dense,
        width_asked=asked,
        width=left,
        energy=energy,
        error_uncompensated=recovery.residual_uncompensated,
        error=recovery.residual,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        ridge_fit=ridge,
        held_out=held_out,
    )


def rotated_qk(qk: QkRecovery) -> QkRecovery:
    """The same logits, by channels of more even ranges."""
    return replace(qk, q_map_HRD=rotated_maps(qk.q_map_HRD), k_map_HRD=rotated_maps(qk.k_map_HRD))


def rotated_values(values: ValueRecovery) -> ValueRecovery:
    """The same outputs, by channels of more even ranges."""
    weight_OK = rotated_back(values.weight_OK, len(values.v_map_HRV))
    return replace(values, v_map_HRV=rotated_maps(values.v_map_HRV), weight_OK=weight_OK)
