"""From the attention moments and the choices to the maps of queries and keys at one site."""

from dataclasses import dataclass

from torch import Tensor

from calib.moments import AttentionMoments

from . import recover_attention
from .choices import Choices
from .errors import BadInput
from .recover_attention import QkRecovery
from .select import kept_from_scores, logit_energy


@dataclass(frozen=True, slots=True, kw_only=True)
class QkAtSite:
    """A recovery and, per head, the dense logit energy in the unit of its residual."""

    recovery: QkRecovery
    energy_H: Tensor


def _system(site: str, moments: AttentionMoments) -> Tensor:
    if moments.system_HTT is None:
        raise BadInput(
            f"{site}: recovery 'logit' needs CORP's per-image system (eq. 15), which these moments were taken without; "
            "calibrate again with --attention-system, or choose 'lowrank' (--preset best)"
        )
    return moments.system_HTT.double()


def qk_at_site(site: str, moments: AttentionMoments, choices: Choices, width: int) -> QkAtSite:
    """Apply the chosen Q/K recovery at one head width. Raises BadInput when the moments lack what it needs."""
    head_dim = moments.qq_HDD.shape[-1]
    q_second_HDD, k_centred_HDD = moments.q_second_HDD, moments.k_centred_HDD
    nothing_HRD = q_second_HDD.new_zeros(q_second_HDD.shape[0], 1, head_dim)
    aggregated_H = recover_attention.residual_aggregated(q_second_HDD, k_centred_HDD, nothing_HRD, nothing_HRD)
    if choices.qk_recovery == "lowrank":
        lowrank = recover_attention.lowrank(q_second_HDD, k_centred_HDD, width)
        return QkAtSite(recovery=lowrank, energy_H=aggregated_H)
    kept_HR = kept_from_scores(logit_energy(moments.energy_HD, moments.images), width)
    if choices.qk_recovery == "select":
        kept = recover_attention.select(kept_HR, q_second_HDD=q_second_HDD, k_second_HDD=k_centred_HDD)
        return QkAtSite(recovery=kept, energy_H=aggregated_H)
    system_HTT = _system(site, moments)
    fitted = recover_attention.logit(system_HTT, kept_HR, head_dim, ridge_rel=choices.ridge_rel)
    energy_H = recover_attention.residual_per_image(system_HTT, nothing_HRD, nothing_HRD)
    return QkAtSite(recovery=fitted, energy_H=energy_H)
