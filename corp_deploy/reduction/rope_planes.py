"""Maps of rotary queries and keys (RoPE), from attention moments and the method: whole rotary planes are kept.

Legend: H heads, D dense head width, K planes kept of D / 2.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra import planes, queries_keys
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.scores import kept_from_scores

from .logits import refuse_other_ranking, refuse_uncovered, system_of
from .method import Method


def kept_planes(scores_HD: Tensor, width: int) -> Tensor:
    """The planes [H,K] whose two dimensions score most together, of heads of so many dimensions."""
    return kept_from_scores(planes.plane_scores(scores_HD), width // 2)


def _by_images(
    site: str, moments: HeadMoments, method: Method, scores_HD: Tensor, width: int, grouped: int
) -> QkRecovery:
    system = system_of(site, moments)
    if system.covered_HS.shape[1] < width == system.head_dim:
        return _selected(moments, kept_planes(scores_HD, width))  # nothing is missing, whatever the system leaves out
    refuse_uncovered(site, system, width, method.align_head)
    covered_HC = planes.covered_planes(system)
    of_covered_HC = planes.plane_scores(scores_HD).gather(1, covered_HC)
    kept_HK = covered_HC.gather(1, kept_from_scores(of_covered_HC, width // 2))
    if method.qk_selection != "energy" and not kept_HK.equal(kept_planes(scores_HD, width)):
        refuse_other_ranking(site, method)
    return planes.logit(system, kept_HK, ridge_rel=method.ridge_rel, grouped=grouped)


def _selected(moments: HeadMoments, kept_HK: Tensor) -> QkRecovery:
    q_second_HDD, k_centred_HDD = moments.q_second_HDD, moments.k_centred_HDD
    dims_HR = planes.dims_of_planes(kept_HK, q_second_HDD.shape[1])
    return replace(
        queries_keys.select(dims_HR, q_second_HDD=q_second_HDD, k_second_HDD=k_centred_HDD), planes_HK=kept_HK
    )


def recovered_planes(
    site: str, moments: HeadMoments, method: Method, scores_HD: Tensor, width: int, *, grouped: int = 1
) -> QkRecovery:
    """The chosen recovery at one head width. `lowrank`, which would mix planes, keeps those of least loss instead.
    `grouped` heads in turn share keys, and have scores alike.
    """
    q_second_HDD, k_centred_HDD = moments.q_second_HDD, moments.k_centred_HDD
    how: dict[str, Any] = {"ridge_rel": method.ridge_rel, "grouped": grouped}
    assert width % 2 == 0, (site, width)
    if method.qk_recovery == "lowrank":
        if moments.plane_gram_HXX is not None:
            return planes.eliminated_exactly(moments.plane_gram_HXX, width // 2, **how)
        return planes.eliminated(q_second_HDD, k_centred_HDD, width // 2, **how)
    if method.qk_recovery == "logit":
        return _by_images(site, moments, method, scores_HD, width, grouped)
    kept_HK = kept_planes(scores_HD, width)
    if method.qk_recovery == "select":
        return _selected(moments, kept_HK)
    assert method.qk_recovery == "logit-v1", method.qk_recovery
    return planes.logit_v1(q_second_HDD, moments.k_second_HDD, kept_HK, **how)
