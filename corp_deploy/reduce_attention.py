"""From the attention moments and the choices to the maps of queries, keys and values at one site. Knows no model.

Legend: H heads, D dense head width, R reduced head width, C = H D, O outputs of the projection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.moments import AttentionMoments

from . import recover_attention, recover_values
from .choices import Choices
from .errors import BadInput
from .recover_attention import QkRecovery
from .recover_values import ValueRecovery
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
    if moments.kept_HK is not None:
        raise BadInput(f"{site}: these moments hold the system of one kept set only; calibrate again for all of them")
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
    if choices.qk_recovery == "logit-v1":
        # The first version's equation as published: both second moments as they are, nothing centred.
        k_second_HDD = moments.k_second_HDD
        single = recover_attention.logit_v1(q_second_HDD, k_second_HDD, kept_HR, ridge_rel=choices.ridge_rel)
        energy_H = recover_attention.residual_aggregated(q_second_HDD, k_second_HDD, nothing_HRD, nothing_HRD)
        return QkAtSite(recovery=single, energy_H=energy_H)
    assert choices.qk_recovery == "logit", choices.qk_recovery
    system_HTT = _system(site, moments)
    fitted = recover_attention.logit(system_HTT, kept_HR, head_dim, ridge_rel=choices.ridge_rel)
    energy_H = recover_attention.residual_per_image(system_HTT, nothing_HRD, nothing_HRD)
    return QkAtSite(recovery=fitted, energy_H=energy_H)


def values_at_site(
    moments: AttentionMoments, choices: Choices, weight_OC: Tensor, bias_O: Tensor | None, heads: int, width: int
) -> ValueRecovery:
    """The values and the output projection at one width per head; kept as they are at full width."""
    if width == weight_OC.shape[1] // heads:
        return recover_values.keep(weight_OC, bias_O, heads)
    assert choices.value_recovery == "lowrank", choices.value_recovery
    return recover_values.lowrank(
        moments.z_mean_C, moments.z_second_CC, weight_OC, bias_O, heads, width, ridge_rel=choices.ridge_rel
    )


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
        """The fused qkv weight [3 C, I] (or bias [3 C]) with every head's rows mapped, in float64."""
        maps = (self.q_HRD, self.k_HRD, self.v_HRD)
        sizes = [each.shape[0] * each.shape[2] for each in maps]
        parts = rows.double().split(sizes)
        return torch.cat([mapped_rows(part, each) for part, each in zip(parts, maps, strict=True)])


def output_energy(moments: AttentionMoments, weight_OC: Tensor) -> float:
    """Variance of the dense projection's output: tr(W C W')."""
    return float(((weight_OC @ moments.z_covariance_CC) * weight_OC).sum())
