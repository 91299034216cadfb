"""The error of the attention logits under maps of queries and keys.

Legend: H heads, D dense head width, R reduced head width, S dimensions that a per-image system covers.
"""

import torch
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra import planes, queries_keys
from corp_deploy.algebra.image_system import ImageSystem, whole_system
from corp_deploy.spec.widths import aligned_widths
from ground.errors import BadInput

from .method import Method


def system_of(site: str, moments: HeadMoments) -> ImageSystem:
    """Return CORP's per-image system in the moments; raise BadInput if they have none."""
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
    """Return the loss of each head's logits [H] by these maps on these moments, by the method's own objective.

    Raises:
        BadInput: the moments lack what the objective needs.
    """
    if method.qk_recovery == "logit":
        system = system_of(site, moments)
        if not (system.covers(q_map_HRD) and system.covers(k_map_HRD)):
            raise BadInput(
                f"{site}: the per-image system in these moments leaves out dimensions that are kept here; "
                "take the moments that judge in one run with the others: calibrate --hold-out N writes both"
            )
        return queries_keys.residual_per_image(system, q_map_HRD, k_map_HRD)
    if method.qk_recovery == "lowrank" and moments.plane_gram_HXX is not None:
        return planes.residual_exact(moments.plane_gram_HXX, q_map_HRD, k_map_HRD)
    # As published, the first version's equation takes both second moments without centring.
    k_HDD = moments.k_second_HDD if method.qk_recovery == "logit-v1" else moments.k_centred_HDD
    return queries_keys.residual_aggregated(moments.q_second_HDD, k_HDD, q_map_HRD, k_map_HRD)


def logit_scale(site: str, moments: HeadMoments, method: Method) -> Tensor:
    """Return each head's dense logit energy [H], in the unit of `logit_error`."""
    nothing_HRD = torch.zeros_like(moments.energy_HD).unsqueeze(1)
    return logit_error(site, moments, method, nothing_HRD, nothing_HRD)


def refuse_uncovered(site: str, system: ImageSystem, width: int, align: int) -> None:
    """Raise BadInput for a head width that the moments' system does not cover."""
    covered = system.covered_HS.shape[1]
    if width > covered:
        there = [each for each in aligned_widths(system.head_dim, align) if each <= covered]
        raise BadInput(
            f"{site}: a head width of {width} was asked for, but the system in these moments covers {covered} of "
            f"{system.head_dim} dimensions; expected a width of {', '.join(map(str, there)) or covered}, or moments "
            f"taken for a wider one: calibrate --attention-system --attn {1.0 - width / system.head_dim:g}"
        )
