"""The recoveries of queries and keys, values, and whole heads at one site, from moments and the method alone.

Of rotary queries and keys (RoPE) whole rotary planes are kept. Whole heads are removed before dimensions of heads.

Legend: H heads, D dense head width, R reduced head width, K planes kept of D / 2, X dimensions or planes, V dimensions
of values, C = H V, O outputs of the projection, M heads left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra import planes, queries_keys, values, whole_heads
from corp_deploy.algebra.block_obs import eliminate_blocks
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.ridges import RidgeChoice, choose_ridge, ridges_from
from corp_deploy.algebra.scores import kept_from_scores, selection
from corp_deploy.algebra.values import ValueRecovery
from ground.errors import BadInput

from .change import site_report
from .logits import logit_error, logit_scale, refuse_uncovered, system_of
from .method import Method
from .report import HeldOut, SiteReport

Statistics = TypeVar("Statistics")
Fit = TypeVar("Fit")


def ridge_by_halves(
    splits: tuple[Statistics, Statistics] | None,
    ridge_rel: float,
    fit: Callable[[Statistics, float], Fit],
    judged: Callable[[Fit, Statistics], HeldOut],
) -> tuple[float, RidgeChoice | None]:
    """Return the ridge of a fit to all images, and the record of its choice, None without `splits`.

    `splits` are the statistics of two halves of the images. With them the ridge is the one whose fits to either half
    lose least on the other half, without them it is `ridge_rel`.
    """
    if splits is None:
        return ridge_rel, None
    ridge = choose_ridge(splits, ridges_from(ridge_rel), fit, lambda recovery, half: judged(recovery, half).share)
    return ridge.strength_whole, ridge


def kept_planes(scores_HD: Tensor, width: int) -> Tensor:
    """Return the planes [H,K] whose two dimensions score most together, for heads of `width` dimensions."""
    return kept_from_scores(planes.plane_scores(scores_HD), width // 2)


def recover_qk(
    site: str,
    moments: HeadMoments,
    method: Method,
    scores_HD: Tensor,
    width: int,
    splits: tuple[HeadMoments, HeadMoments] | None = None,
    *,
    in_planes: bool = False,
    grouped: int = 1,
) -> tuple[QkRecovery, RidgeChoice | None]:
    """Return the recovery of queries and keys at one head width, and the choice of its ridge, None without a choice.

    `scores_HD` rank the dimensions. `splits`, the moments of two halves of the images, choose the ridge that pulls
    CORP's maps (`logit`) toward the unchanged dimensions. `in_planes`: whole planes are removed, the same ones in each
    run of `grouped` consecutive heads, which share keys and have equal scores.

    Raises:
        BadInput: the moments lack what the recovery needs.
    """
    assert in_planes or grouped == 1, site
    assert not in_planes or width % 2 == 0, (site, width)

    def fit(of: HeadMoments, strength: float) -> QkRecovery:
        own = replace(method, ridge_rel=strength)
        return _recover_at_ridge(site, of, own, scores_HD, width, in_planes=in_planes, grouped=grouped)

    def judged(recovery: QkRecovery, half: HeadMoments) -> HeldOut:
        return judge_qk(site, recovery, half, method)

    chooses = method.qk_recovery == "logit" and width < moments.energy_HD.shape[1]
    strength, ridge = ridge_by_halves(splits if chooses else None, method.ridge_rel, fit, judged)
    return fit(moments, strength), ridge


def judge_qk(site: str, recovery: QkRecovery, moments: HeadMoments, method: Method) -> HeldOut:
    """Return the recovered logits' error and the dense logits' energy on any moments, also others than the fit's."""
    error_H = logit_error(site, moments, method, recovery.q_map_HRD, recovery.k_map_HRD)
    return HeldOut(energy=float(logit_scale(site, moments, method).sum()), error=float(error_H.sum()))


def _recover_at_ridge(
    site: str, moments: HeadMoments, method: Method, scores_HD: Tensor, width: int, *, in_planes: bool, grouped: int
) -> QkRecovery:
    """Recover queries and keys at the method's ridge; `in_planes`, `lowrank` eliminates planes instead of mixing."""
    seconds, ridge_rel = (moments.q_second_HDD, moments.k_centred_HDD), method.ridge_rel
    places, scores_HX = (width // 2, planes.plane_scores(scores_HD)) if in_planes else (width, scores_HD)
    if method.qk_recovery == "lowrank":
        if not in_planes:
            return queries_keys.lowrank(*seconds, width)
        if moments.plane_gram_HXX is not None:
            return planes.eliminate_planes_exactly(moments.plane_gram_HXX, places, ridge_rel=ridge_rel, grouped=grouped)
        return planes.eliminate_planes(*seconds, places, ridge_rel=ridge_rel, grouped=grouped)
    kept_HX = kept_from_scores(scores_HX, places)
    if method.qk_recovery == "logit":
        system = system_of(site, moments)
        # At full width nothing is missing, whatever the system leaves out.
        if not system.covered_HS.shape[1] < width == system.head_dim:
            refuse_uncovered(site, system, width, method.align_head)
            covered_HX = planes.covered_planes(system) if in_planes else system.covered_HS
            inside_HX = _best_covered(site, method, covered_HX, scores_HX, kept_HX)
            if in_planes:
                return planes.logit_planes(system, inside_HX, ridge_rel=ridge_rel, grouped=grouped)
            return queries_keys.logit(system, inside_HX, ridge_rel=ridge_rel)
    elif method.qk_recovery == "logit-v1":
        published = moments.q_second_HDD, moments.k_second_HDD, kept_HX
        if in_planes:
            return planes.fit_aggregated(*published, kept_HX, ridge_rel=ridge_rel, grouped=grouped)
        return queries_keys.logit_v1(*published, ridge_rel=ridge_rel)
    kept_HR = planes.dims_of_planes(kept_HX, scores_HD.shape[1]) if in_planes else kept_HX
    selected = queries_keys.select(kept_HR, q_second_HDD=seconds[0], k_second_HDD=seconds[1])
    return replace(selected, planes_HK=kept_HX) if in_planes else selected


def _best_covered(site: str, method: Method, covered_HX: Tensor, scores_HX: Tensor, kept_HX: Tensor) -> Tensor:
    """Return the dimensions or planes of highest score that the moments' system covers, as many as `kept_HX` has.

    Raises:
        BadInput: they differ from `kept_HX`, the best of all, because the ranking isn't the one that calibration used.
    """
    best_HX = kept_from_scores(scores_HX.gather(1, covered_HX), kept_HX.shape[1])
    inside_HX = covered_HX.gather(1, best_HX)
    if method.qk_selection != "energy" and not inside_HX.equal(kept_HX):
        raise BadInput(
            f"{site}: the ranking by {method.qk_selection} keeps dimensions that the system in these moments leaves "
            "out; calibrate --attn covers those of most logit energy: rank by energy, or calibrate without --attn"
        )
    return inside_HX


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """The moments of all heads' outputs, side by side, with the projection that reads them."""

    z_mean_C: Tensor
    z_second_CC: Tensor
    weight_OC: Tensor
    bias_O: Tensor

    @property
    def z_covariance_CC(self) -> Tensor:
        return self.z_second_CC - torch.outer(self.z_mean_C, self.z_mean_C)

    @property
    def energy(self) -> float:
        """The variance of the dense projection's output: tr(W C W')."""
        return variance(self.weight_OC, self.z_covariance_CC)

    def judged(self, weight_OC: Tensor, bias_O: Tensor) -> HeldOut:
        """Return E||y - y'||^2 of another projection, with the output's variance."""
        change_OC, change_O = self.weight_OC - weight_OC, self.bias_O - bias_O
        return HeldOut(energy=self.energy, error=output_error(self.z_mean_C, self.z_second_CC, change_OC, change_O))

    def at(self, kept_K: Tensor, recovery: ChannelRecovery) -> "HeadOutputs":
        """Return the moments of these columns only, with the recovered projection that reads them."""
        return HeadOutputs(
            z_mean_C=self.z_mean_C[kept_K],
            z_second_CC=self.z_second_CC[kept_K[:, None], kept_K],
            weight_OC=recovery.weight_OK,
            bias_O=recovery.bias_O,
        )


def recover_values(
    own: HeadOutputs, method: Method, heads: int, width: int, splits: tuple[HeadOutputs, HeadOutputs] | None = None
) -> tuple[ValueRecovery, RidgeChoice | None]:
    """Return values and output projection at one width per head, and the choice of the ridge, None without a choice.

    `splits`, the moments of two halves of the images, choose the ridge of the joint refit, which pulls toward the best
    projection of each head alone.
    """
    if width == own.weight_OC.shape[1] // heads:
        return values.keep_values(own.weight_OC, own.bias_O, heads), None
    assert method.value_recovery == "lowrank", method.value_recovery

    def fit(of: HeadOutputs, strength: float) -> ValueRecovery:
        projection = own.weight_OC, own.bias_O
        return values.lowrank_values(of.z_mean_C, of.z_second_CC, *projection, heads, width, ridge_rel=strength)

    def judged(recovery: ValueRecovery, half: HeadOutputs) -> HeldOut:
        return half.judged(recovery.as_dense_OC, recovery.bias_O)

    strength, ridge = ridge_by_halves(splits, method.ridge_rel, fit, judged)
    return fit(own, strength), ridge


def kept_groups(own: HeadOutputs, method: Method, groups: int, count: int) -> Tensor:
    """Return the indices of the `count` runs that stay, ascending, of `groups` equal runs of consecutive heads."""
    if method.heads_selection == "obs":
        # The heads of a group share keys and values, so they are removed together.
        size, ridge_rel = own.weight_OC.shape[1] // groups, method.ridge_rel
        order_G = eliminate_blocks(own.z_covariance_CC, own.weight_OC, size, ridge_rel=ridge_rel).order_F
        return order_G[groups - count :].sort().values
    if method.heads_selection == "magnitude":
        return kept_from_scores(whole_heads.weight_energy(own.weight_OC, groups), count)
    assert method.heads_selection == "grail", method.heads_selection
    return kept_from_scores(whole_heads.output_energy(own.z_second_CC, own.weight_OC, groups), count)


def recover_heads(
    site: str,
    heads: int,
    own: HeadOutputs,
    method: Method,
    kept_M: Tensor,
    held_out: HeadOutputs | None = None,
    splits: tuple[HeadOutputs, HeadOutputs] | None = None,
) -> tuple[ChannelRecovery, SiteReport]:
    """Return the projection that reads these heads only, with its report.

    `splits`, the moments of two halves of the images, choose the ridge; see ridge_by_halves.
    """
    how = method.heads_recovery
    assert how != "keep", method
    map_MH = selection(kept_M, heads)
    eye_VV = torch.eye(own.weight_OC.shape[1] // heads, dtype=torch.float64, device=map_MH.device)

    def fit(of: HeadOutputs, strength: float) -> ChannelRecovery:
        parts = of.z_mean_C, of.z_second_CC, own.weight_OC, own.bias_O
        return whole_heads.recover_projection(*parts, map_MH, how, ridge_rel=strength)

    def judged(recovery: ChannelRecovery, other: HeadOutputs) -> HeldOut:
        return other.judged(recovery.weight_OK @ torch.kron(map_MH, eye_VV), recovery.bias_O)

    strength, ridge = ridge_by_halves(None if how == "none" else splits, method.ridge_rel, fit, judged)
    recovery = fit(own, strength)
    elsewhere = None if held_out is None else judged(recovery, held_out)
    widths = heads, heads * method.heads_kept, len(kept_M)
    return recovery, site_report(site, "heads", widths, recovery, energy=own.energy, held_out=elsewhere, ridge=ridge)


def qk_report(
    site: str,
    dense: int,
    recovery: QkRecovery,
    moments: HeadMoments,
    method: Method,
    held_out: HeadMoments | None,
    ridge: RidgeChoice | None = None,
) -> SiteReport:
    """Return the report of recovered queries and keys; `dense`: their width per head before."""
    widths = dense, dense * method.attention_kept, recovery.q_map_HRD.shape[1]
    energy = float(logit_scale(site, moments, method).sum())
    elsewhere = None if held_out is None else judge_qk(site, recovery, held_out, method)
    return site_report(site, "qk", widths, recovery, energy=energy, held_out=elsewhere, ridge=ridge)
