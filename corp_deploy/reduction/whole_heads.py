"""Whole heads go from an attention, before its head widths are asked for: which, and the projection that repairs it.

Legend: H heads, D dimensions of queries and keys, V of values, C = H V, O outputs of the projection, M heads left.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corp_deploy.algebra import whole_heads
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.quadratic import output_error
from corp_deploy.algebra.ridges import RidgeChoice, chosen_ridge, ridges_from
from corp_deploy.algebra.scores import kept_from_scores

from .heads import HeadOutputs, output_energy
from .method import Method
from .report import HeldOut, SiteReport, ridge_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """The dense output projection in float64, and the heads that stay in front of it."""

    weight_OC: Tensor
    bias_O: Tensor | None
    map_MH: Tensor

    def recovered(self, moments: HeadOutputs, method: Method, ridge_rel: float) -> ChannelRecovery:
        assert method.heads_recovery != "keep", method
        return whole_heads.recovered(
            moments.z_mean_C,
            moments.z_second_CC,
            self.weight_OC,
            self.bias_O,
            self.map_MH,
            method.heads_recovery,
            ridge_rel=ridge_rel,
        )

    def error(self, recovery: ChannelRecovery, moments: HeadOutputs) -> float:
        """E||y - y'||^2 of the new projection on any moments of the dense z."""
        width = self.weight_OC.shape[1] // self.map_MH.shape[1]
        eye_VV = torch.eye(width, dtype=torch.float64, device=self.map_MH.device)
        change_OC = self.weight_OC - recovery.weight_OK @ torch.kron(self.map_MH, eye_VV)
        change_O = -recovery.bias_O if self.bias_O is None else self.bias_O - recovery.bias_O
        return output_error(moments.z_mean_C, moments.z_second_CC, change_OC, change_O)

    def ridge(self, splits: tuple[HeadOutputs, HeadOutputs], method: Method) -> RidgeChoice:
        """The strength whose projections of either half lose least on the other."""

        def share_lost(recovery: ChannelRecovery, half: HeadOutputs) -> float:
            energy = output_energy(half, self.weight_OC)
            return self.error(recovery, half) / energy if energy > 0.0 else 0.0

        def fit(half: HeadOutputs, strength: float) -> ChannelRecovery:
            return self.recovered(half, method, strength)

        return chosen_ridge(splits, ridges_from(method.ridge_rel), fit, share_lost)


def kept_groups(weight_OC: Tensor, moments: HeadOutputs, method: Method, groups: int, count: int) -> Tensor:
    """Of so many groups of as many neighbours those that stay."""
    if method.heads_selection == "obs":
        order_G = whole_heads.eliminated(moments.z_covariance_CC, weight_OC, groups, ridge_rel=method.ridge_rel).order_F
        return order_G[groups - count :].sort().values
    if method.heads_selection == "magnitude":
        return kept_from_scores(whole_heads.magnitude(weight_OC, groups), count)
    assert method.heads_selection == "grail", method.heads_selection
    return kept_from_scores(whole_heads.output_energy(moments.z_second_CC, weight_OC, groups), count)


def heads_report(
    site: str,
    heads: int,
    method: Method,
    count: int,
    recovery: ChannelRecovery,
    energy: float,
    held_out: HeldOut | None,
) -> SiteReport:
    """What happened to the heads of one attention."""
    return SiteReport(
        site=site,
        part="heads",
        width_dense=heads,
        width_asked=heads * method.heads_kept,
        width=count,
        energy=energy,
        error_uncompensated=recovery.residual_uncompensated,
        error=recovery.residual,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        held_out=held_out,
    )


def projected(
    site: str,
    heads: int,
    projection: tuple[Tensor, Tensor | None],
    moments: HeadOutputs,
    method: Method,
    kept_M: Tensor,
    held_out: HeadOutputs | None = None,
    splits: tuple[HeadOutputs, HeadOutputs] | None = None,
) -> tuple[ChannelRecovery, SiteReport]:
    """A projection's weight and bias with these heads in front of it, and what to report; see `fewer_heads`."""
    weight_OC, bias_O = projection
    own = _Projection(weight_OC=weight_OC, bias_O=bias_O, map_MH=whole_heads.selection(kept_M, heads))
    ridge = None if splits is None or method.heads_recovery == "none" else own.ridge(splits, method)
    recovery = own.recovered(moments, method, method.ridge_rel if ridge is None else ridge.strength_whole)
    elsewhere = None
    if held_out is not None:
        elsewhere = HeldOut(energy=output_energy(held_out, weight_OC), error=own.error(recovery, held_out))
    energy = output_energy(moments, weight_OC)
    report = heads_report(site, heads, method, len(kept_M), recovery, energy, elsewhere)
    return recovery, replace(report, ridge_fit=ridge_fit(ridge))
