"""Whole heads go from an attention, before its head widths are asked for: which, and the projection that repairs it.

Legend: H heads, D dimensions of queries and keys, V of values, C = H V, O outputs of the projection, M heads left.
"""

import torch
from torch import Tensor

from corp_deploy.algebra import whole_heads
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.scores import kept_from_scores

from .heads import HeadOutputs, fitted
from .method import Method
from .report import HeldOut, SiteReport, site_report


def kept_groups(own: HeadOutputs, method: Method, groups: int, count: int) -> Tensor:
    """Of so many groups of as many neighbours those that stay."""
    if method.heads_selection == "obs":
        covariance_CC = own.z_covariance_CC
        order_G = whole_heads.eliminated(covariance_CC, own.weight_OC, groups, ridge_rel=method.ridge_rel).order_F
        return order_G[groups - count :].sort().values
    if method.heads_selection == "magnitude":
        return kept_from_scores(whole_heads.magnitude(own.weight_OC, groups), count)
    assert method.heads_selection == "grail", method.heads_selection
    return kept_from_scores(whole_heads.output_energy(own.z_second_CC, own.weight_OC, groups), count)


def projected(
    site: str,
    heads: int,
    own: HeadOutputs,
    method: Method,
    kept_M: Tensor,
    held_out: HeadOutputs | None = None,
    splits: tuple[HeadOutputs, HeadOutputs] | None = None,
) -> tuple[ChannelRecovery, SiteReport]:
    """The projection with these heads in front of it, and what to report. `splits` of the images
    choose the ridge whose projections of either half lose least on the other.
    """
    how = method.heads_recovery
    assert how != "keep", method
    map_MH = whole_heads.selection(kept_M, heads)
    eye_VV = torch.eye(own.weight_OC.shape[1] // heads, dtype=torch.float64, device=map_MH.device)

    def fit(of: HeadOutputs, strength: float) -> ChannelRecovery:
        parts = of.z_mean_C, of.z_second_CC, own.weight_OC, own.bias_O
        return whole_heads.recovered(*parts, map_MH, how, ridge_rel=strength)

    def judged(recovery: ChannelRecovery, other: HeadOutputs) -> HeldOut:
        return other.judged(recovery.weight_OK @ torch.kron(map_MH, eye_VV), recovery.bias_O)

    recovery, ridge = fitted(own, None if how == "none" else splits, method.ridge_rel, fit, judged)
    elsewhere = None if held_out is None else judged(recovery, held_out)
    widths = heads, heads * method.heads_kept, len(kept_M)
    return recovery, site_report(site, "heads", widths, recovery, energy=own.energy, held_out=elsewhere, ridge=ridge)
