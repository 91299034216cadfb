"""Values of traced models: the algebra of heads on the rows that make them and the layer that reads what heads give.

Legend: H heads, V dimensions of a head, R kept, C = H V, O outputs of that layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corp_deploy.algebra import values
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.values import ValueRecovery
from corp_deploy.families.traced_values import TracedValues
from corp_deploy.families.widths import aligned_width, aligned_widths

from .chosen import Chosen
from .head_modules import rotated_values, value_report
from .heads import values_at_site
from .kind import ErrorCurve
from .method import Method
from .traced_kind import Change, Mapped, TracedKind, TracedReduced
from .traced_reads import Read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What all heads give, side by side, to the layer that reads it."""

    z_mean_C: Tensor
    z_second_CC: Tensor
    weight_OC: Tensor
    bias_O: Tensor

    @property
    def z_covariance_CC(self) -> Tensor:
        return self.z_second_CC - torch.outer(self.z_mean_C, self.z_mean_C)


class TracedValuesKind(TracedKind[TracedValues]):
    """See Kind; where dimensions can't be mixed, some are chosen."""

    def __init__(self) -> None:
        super().__init__("values")

    def sparsity(self, method: Method) -> float | None:
        return method.heads_sparsity or method.attention_sparsity

    def refusal(self, site: TracedValues, method: Method) -> str:
        return "of a traced model no heads are removed whole" if method.heads_sparsity else ""

    def uniform(self, site: TracedValues, method: Method) -> int | None:
        """Of square heads alone: as wide as the queries, where those can be narrowed."""
        if method.geometry != "square" or not method.reduces_attention or self.refusal(site, method):
            return None
        size = aligned_width(_head(site), method.attention_kept, method.align_head)
        return _square(site, size)

    def widths(self, site: TracedValues, method: Method) -> tuple[int, ...]:
        """As many as queries have, where heads are square."""
        if method.geometry != "square":
            return super().widths(site, method)
        return tuple(_square(site, size) for size in aligned_widths(_head(site), method.align_head))

    def offers(self, site: TracedValues, method: Method) -> tuple[int, ...]:
        stays = method.value_recovery == "keep" or self.refusal(site, method)
        return (site.width,) if stays else self.widths(site, method)

    def chosen(self, site: TracedValues, moments: Any, method: Method, width: int, known: Any = None) -> Chosen | None:
        return None if site.rows is not None else super().chosen(site, moments, method, width, known)

    def reduced(
        self,
        site: TracedValues,
        moments: tuple[Read, ...],
        method: Method,
        width: int,
        *,
        known: Elimination | Chosen | None = None,
        held_out: tuple[Read, ...] | None = None,
        halves: tuple[tuple[Read, ...], tuple[Read, ...]] | None = None,
    ) -> TracedReduced:
        if site.rows is None:
            others: dict[str, Any] = {"known": known, "held_out": held_out, "halves": halves}
            return super().reduced(site, moments, method, width, **others)
        own, (heads, dense) = _given(site, moments), site.groups_HV.shape
        each, by_half = width // heads, None if halves is None else (_given(site, halves[0]), _given(site, halves[1]))
        at_site = values_at_site(own, method, own.weight_OC, own.bias_O, heads, each, by_half)
        other = None if held_out is None else _given(site, held_out)
        report = value_report(site.name, dense, (own.weight_OC, own.bias_O), at_site, own, method, each, other)
        kept_K = site.groups_HV[:, :each].flatten().sort().values.to(own.weight_OC.device)
        if each == dense:
            return TracedReduced(modules={}, reports=[report], kept_K=kept_K)
        recovery = rotated_values(at_site.recovery) if method.rotates else at_site.recovery
        change = Change(read=moments[0], recovery=_as_channels(site, recovery))
        return TracedReduced(
            modules={}, reports=[report], kept_K=kept_K, changes=(change,), mapped=(_mapped(site, recovery),)
        )

    def elimination(self, site: TracedValues, moments: tuple[Read, ...], method: Method) -> Elimination | None:
        return None if site.rows is not None else super().elimination(site, moments, method)

    def curves(
        self, site: TracedValues, moments: tuple[Read, ...], method: Method, known: Elimination | None
    ) -> list[ErrorCurve]:
        if site.rows is None:
            return super().curves(site, moments, method, known)
        own, widths = _given(site, moments), self.offers(site, method)
        lost_H = values.lowrank_spectrum(own.z_mean_C, own.z_second_CC, own.weight_OC, len(site.groups_HV))
        errors = tuple(float(lost_H[:, width // len(lost_H)].sum()) for width in widths)
        return [ErrorCurve(errors=errors, alone=widths, places=tuple(range(len(widths))))]


def _head(site: TracedValues) -> int:
    """What is as wide as a head's values are to be, where heads are square."""
    return site.queries or site.groups_HV.shape[1]


def _square(site: TracedValues, size: int) -> int:
    """All of them, beside queries of this size; whole where those are."""
    heads, dense = site.groups_HV.shape
    return heads * (dense if size == _head(site) else min(size, dense))


def _given(site: TracedValues, reads: tuple[Read, ...]) -> _Given:
    """Head by head."""
    (read,) = reads
    order_C = site.groups_HV.flatten().to(read.weight_OU.device)
    return _Given(
        z_mean_C=read.stats.mean_U[order_C],
        z_second_CC=read.stats.second_UU[order_C[:, None], order_C],
        weight_OC=read.weight_OU[:, order_C],
        bias_O=read.bias_O,
    )


def _as_channels(site: TracedValues, recovery: ValueRecovery) -> ChannelRecovery:
    """The layer that reads new values, on the groups that stay in their order."""
    order_K = site.groups_HV[:, : recovery.v_map_HRV.shape[1]].flatten().argsort()
    return ChannelRecovery(
        weight_OK=recovery.weight_OK[:, order_K.to(recovery.weight_OK.device)],
        bias_O=recovery.bias_O,
        residual=recovery.residual,
        residual_uncompensated=recovery.residual_uncompensated,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
    )


def _mapped(site: TracedValues, recovery: ValueRecovery) -> Mapped:
    assert site.rows is not None, site.name
    return Mapped(
        rows=site.rows,
        rows_HD=site.rows_HV.to(recovery.v_map_HRV.device),
        map_HRD=recovery.v_map_HRV,
        weight=site.program.tensor(site.rows.weight).detach().double(),
        bias=site.program.tensor(site.rows.bias).detach().double(),
    )
