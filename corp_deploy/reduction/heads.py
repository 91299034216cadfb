"""From the attention moments and the method to the maps of queries, keys and values at one site. Knows no model.

Legend: H heads, D dense head width, R reduced head width, C = H D, O outputs of the projection.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra import queries_keys, scores, values
from corp_deploy.algebra.image_system import ImageSystem, whole_system
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.ridges import RidgeChoice, chosen_ridge, ridges_from
from corp_deploy.algebra.values import ValueRecovery
from corp_deploy.families.widths import aligned_widths
from ground.errors import BadInput

from .method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class QkAtSite:
    """A recovery and, per head, the dense logit energy in the unit of its residual; `ridge`: how strong it was chosen,
    where halves of the images chose.
    """

    recovery: QkRecovery
    energy_H: Tensor
    ridge: RidgeChoice | None = None


Halves = tuple[HeadMoments, HeadMoments]


def _system(site: str, moments: HeadMoments) -> ImageSystem:
    if moments.system_HTT is None:
        raise BadInput(
            f"{site}: recovery 'logit' needs CORP's per-image system (eq. 15), which these moments were taken without; "
            "calibrate again with --attention-system, or choose 'lowrank' (--preset best)"
        )
    head_dim = moments.energy_HD.shape[1]
    if moments.kept_HK is None:
        return whole_system(moments.system_HTT.double(), head_dim)
    assert moments.target_HKK is not None, site
    assert moments.target_energy_H is not None, site
    return ImageSystem(
        head_dim=head_dim,
        covered_HS=moments.kept_HK,
        system_HTT=moments.system_HTT.double(),
        target_HSS=moments.target_HKK.double(),
        energy_H=moments.target_energy_H.double(),
    )


def logit_error(site: str, moments: HeadMoments, method: Method, q_map_HRD: Tensor, k_map_HRD: Tensor) -> Tensor:
    """What any maps lose of each head's logits [H], on the objective of the chosen recovery and on any moments.

    Raises BadInput when the moments lack what the objective needs.
    """
    if method.qk_recovery == "logit":
        system = _system(site, moments)
        if not (system.covers(q_map_HRD) and system.covers(k_map_HRD)):
            raise BadInput(
                f"{site}: the system in these moments leaves out dimensions that are kept here; "
                "take both moments with the kept sets of one first pass: calibrate --hold-out N writes both"
            )
        return queries_keys.residual_per_image(system, q_map_HRD, k_map_HRD)
    # The first version's equation as published takes both second moments as they are, nothing centred.
    k_HDD = moments.k_second_HDD if method.qk_recovery == "logit-v1" else moments.k_centred_HDD
    return queries_keys.residual_aggregated(moments.q_second_HDD, k_HDD, q_map_HRD, k_map_HRD)


def logit_scale(site: str, moments: HeadMoments, method: Method) -> Tensor:
    """Each head's dense logit energy [H], in the unit of `logit_error`."""
    nothing_HRD = torch.zeros_like(moments.energy_HD).unsqueeze(1)
    return logit_error(site, moments, method, nothing_HRD, nothing_HRD)


def qk_scores(moments: HeadMoments, method: Method, rows_XI: Tensor) -> Tensor:
    """What ranks the dimensions of each head [H, D]; `rows_XI` are those of the fused projection, queries first."""
    if method.qk_selection == "energy":
        return scores.logit_energy(moments.energy_HD, moments.images)
    heads, head_dim = moments.energy_HD.shape
    rows_2HDI = rows_XI[: 2 * heads * head_dim].reshape(2, heads, head_dim, -1)
    return scores.logit_magnitude(rows_2HDI[0], rows_2HDI[1])


def qk_at_site(
    site: str,
    moments: HeadMoments,
    method: Method,
    rows_XI: Tensor,
    width: int,
    halves: Halves | None = None,
) -> QkAtSite:
    """Apply the chosen Q/K recovery at one head width. `halves` of the images choose the ridge that pulls CORP's maps
    (`logit`) toward the dimensions as they are. Raises BadInput when the moments lack what the recovery needs.
    """
    scores_HD, ridge = qk_scores(moments, method, rows_XI), None
    if halves is not None and method.qk_recovery == "logit" and width < moments.energy_HD.shape[1]:
        ridge = _qk_ridge(site, halves, method, scores_HD, width)
        method = replace(method, ridge_rel=ridge.strength_whole)
    recovery = _recovered_qk(site, moments, method, scores_HD, width)
    return QkAtSite(recovery=recovery, energy_H=logit_scale(site, moments, method), ridge=ridge)


def kept_qk(moments: HeadMoments) -> QkRecovery:
    """Queries and keys as they are, where nothing may be done to them."""
    heads, dense, _ = moments.q_second_HDD.shape
    every_HR = torch.arange(dense, device=moments.q_second_HDD.device).expand(heads, dense)
    return queries_keys.select(every_HR, q_second_HDD=moments.q_second_HDD, k_second_HDD=moments.k_centred_HDD)


def _kept_inside(site: str, system: ImageSystem, scores_HD: Tensor, width: int, align: int) -> Tensor:
    """The best dimensions among those that the system covers; all of them where it was taken for this very width."""
    covered = system.covered_HS.shape[1]
    if width > covered:
        there = [each for each in aligned_widths(system.head_dim, align) if each <= covered]
        raise BadInput(
            f"{site}: a head width of {width} was asked for, but the system in these moments covers {covered} of "
            f"{system.head_dim} dimensions; expected a width of {', '.join(map(str, there)) or covered}, or moments "
            f"taken for a wider one: calibrate --attention-system --attn {1.0 - width / system.head_dim:g}"
        )
    best_HR = scores.kept_from_scores(scores_HD.gather(1, system.covered_HS), width)
    return system.covered_HS.gather(1, best_HR)


def _qk_ridge(site: str, halves: Halves, method: Method, scores_HD: Tensor, width: int) -> RidgeChoice:
    """The strength whose maps of either half lose least of the logits of the other."""

    def share_lost(recovery: QkRecovery, half: HeadMoments) -> float:
        energy = float(logit_scale(site, half, method).sum())
        error_H = logit_error(site, half, method, recovery.q_map_HRD, recovery.k_map_HRD)
        return float(error_H.sum()) / energy if energy > 0.0 else 0.0

    def fit(half: HeadMoments, strength: float) -> QkRecovery:
        return _recovered_qk(site, half, replace(method, ridge_rel=strength), scores_HD, width)

    return chosen_ridge(halves, ridges_from(method.ridge_rel), fit, share_lost)


def _recovered_qk(site: str, moments: HeadMoments, method: Method, scores_HD: Tensor, width: int) -> QkRecovery:
    q_second_HDD, k_centred_HDD = moments.q_second_HDD, moments.k_centred_HDD
    if method.qk_recovery == "lowrank":
        return queries_keys.lowrank(q_second_HDD, k_centred_HDD, width)
    if method.qk_recovery == "logit":
        system = _system(site, moments)
        if system.covered_HS.shape[1] < width == system.head_dim:
            return kept_qk(moments)  # nothing is missing at full width, whatever the system leaves out
        kept_HR = _kept_inside(site, system, scores_HD, width, method.align_head)
        if method.qk_selection != "energy" and not kept_HR.equal(scores.kept_from_scores(scores_HD, width)):
            raise BadInput(
                f"{site}: ranked by {method.qk_selection}, dimensions are kept that the system in these moments "
                "leaves out: calibrate --attn keeps those of most logit energy; rank by it, or calibrate without --attn"
            )
        return queries_keys.logit(system, kept_HR, ridge_rel=method.ridge_rel)
    kept_HR = scores.kept_from_scores(scores_HD, width)
    if method.qk_recovery == "select":
        return queries_keys.select(kept_HR, q_second_HDD=q_second_HDD, k_second_HDD=k_centred_HDD)
    assert method.qk_recovery == "logit-v1", method.qk_recovery
    return queries_keys.logit_v1(q_second_HDD, moments.k_second_HDD, kept_HR, ridge_rel=method.ridge_rel)


def leaves_values(method: Method, width: int, dense: int) -> bool:
    """Whether values are none of the method's business: at full width, unless heads are square."""
    return width == dense and method.geometry != "square"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesAtSite:
    """A recovery; `ridge`: how strong it was chosen, where halves of the images chose."""

    recovery: ValueRecovery
    ridge: RidgeChoice | None = None


def _value_ridge(
    halves: Halves, least: float, weight_OC: Tensor, bias_O: Tensor | None, heads: int, width: int
) -> RidgeChoice:
    """The strength whose values and projections of either half lose least on the other."""

    def share_lost(recovery: ValueRecovery, half: HeadMoments) -> float:
        energy = output_energy(half, weight_OC)
        return error_of(recovery, weight_OC, bias_O, half) / energy if energy > 0.0 else 0.0

    def fit(half: HeadMoments, strength: float) -> ValueRecovery:
        return values.lowrank(half.z_mean_C, half.z_second_CC, weight_OC, bias_O, heads, width, ridge_rel=strength)

    return chosen_ridge(halves, ridges_from(least), fit, share_lost)


def values_at_site(
    moments: HeadMoments,
    method: Method,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    heads: int,
    width: int,
    halves: Halves | None = None,
) -> ValuesAtSite:
    """The values and the output projection at one width per head. `halves` of the images choose the ridge of the joint
    refit, which pulls toward the best projection of each head alone.
    """
    dense = weight_OC.shape[1] // heads
    if leaves_values(method, width, dense):
        return ValuesAtSite(recovery=values.keep(weight_OC, bias_O, heads))
    assert method.value_recovery == "lowrank", method.value_recovery
    ridge, ridge_rel = None, method.ridge_rel
    if halves is not None and width < dense:
        ridge = _value_ridge(halves, ridge_rel, weight_OC, bias_O, heads, width)
        ridge_rel = ridge.strength_whole
    recovery = values.lowrank(
        moments.z_mean_C, moments.z_second_CC, weight_OC, bias_O, heads, width, ridge_rel=ridge_rel
    )
    return ValuesAtSite(recovery=recovery, ridge=ridge)


def mapped_rows(rows_XC: Tensor, maps_HRD: Tensor) -> Tensor:
    """Apply each head's map to its rows: [H*D, C] (or [H*D]) -> [H*R, C] (or [H*R])."""
    heads, _, dense = maps_HRD.shape
    by_head = rows_XC.reshape(heads, dense, -1)
    return (maps_HRD @ by_head).reshape(-1, *rows_XC.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMaps:
    """Per head: new q = q_map q, k = k_map k, v = v_map v."""

    q_HRD: Tensor
    k_HRD: Tensor
    v_HRD: Tensor

    def applied(self, rows: Tensor) -> Tensor:
        """The fused weight [3 C, I] (or bias [3 C]) with every head's rows mapped, in float64."""
        maps = (self.q_HRD, self.k_HRD, self.v_HRD)
        sizes = [each.shape[0] * each.shape[2] for each in maps]
        by_map = rows.double().split(sizes)
        return torch.cat([mapped_rows(rows_HDI, each) for rows_HDI, each in zip(by_map, maps, strict=True)])


def output_energy(moments: HeadMoments, weight_OC: Tensor) -> float:
    """Variance of the dense projection's output: tr(W C W')."""
    return variance(weight_OC, moments.z_covariance_CC)


def error_of(recovery: ValueRecovery, weight_OC: Tensor, bias_O: Tensor | None, moments: HeadMoments) -> float:
    """E||y - y'||^2 of new values and projection on any moments of the dense z."""
    bias_change_O = -recovery.bias_O if bias_O is None else bias_O - recovery.bias_O
    return output_error(moments.z_mean_C, moments.z_second_CC, weight_OC - recovery.as_dense_OC, bias_change_O)
