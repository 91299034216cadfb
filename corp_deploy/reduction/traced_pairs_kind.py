"""Queries and keys of traced models: the algebra of heads on the rows that make them.

Legend: H heads, D dimensions of a head, R kept, I inputs of the layers.
"""

from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from calib.combination import without
from calib.moments import HeadMoments, Moments
from corp_deploy.families.traced_pairs import Side, TracedPairs
from corp_deploy.families.widths import aligned_width, aligned_widths
from ground.errors import BadInput

from .head_modules import qk_report, rotated_qk
from .heads import qk_at_site
from .kind import ErrorCurve
from .method import Method
from .statistics import statistics_at
from .traced_kind import Mapped, TracedReduced


class TracedPairsKind:
    """See Kind."""

    eliminates: ClassVar[bool] = False

    def moments_at(self, site: TracedPairs, moments: Moments, device: torch.device) -> HeadMoments:
        return statistics_at(site, moments, HeadMoments, device)

    def rest_of(self, own: HeadMoments, half: HeadMoments) -> HeadMoments:
        return without(own, half)

    def sparsity(self, method: Method) -> float | None:
        return method.attention_sparsity

    def uniform(self, site: TracedPairs, method: Method) -> int | None:
        if not method.reduces_attention:
            return None
        return site.parts * aligned_width(site.width // site.parts, method.attention_kept, method.align_head)

    def widths(self, site: TracedPairs, method: Method) -> tuple[int, ...]:
        return tuple(site.parts * each for each in aligned_widths(site.width // site.parts, method.align_head))

    def offers(self, site: TracedPairs, method: Method) -> tuple[int, ...]:
        return (site.width,) if method.qk_recovery == "keep" else self.widths(site, method)

    def refusal(self, site: TracedPairs, method: Method) -> str:
        return ""

    def note(self, site: TracedPairs, method: Method, width: int | None) -> str | None:
        return None

    def chosen(self, site: TracedPairs, moments: HeadMoments, method: Method, width: int, known: object = None) -> None:
        """Recoveries choose themselves."""

    def reduced(
        self,
        site: TracedPairs,
        moments: HeadMoments,
        method: Method,
        width: int,
        *,
        known: object = None,
        held_out: HeadMoments | None = None,
        halves: tuple[HeadMoments, HeadMoments] | None = None,
    ) -> TracedReduced:
        each = width // len(site.groups_HD)
        rows_XI = torch.cat([_rows(site, side).flatten(0, 1) for side in (site.queries, site.keys)])
        at_site = qk_at_site(site.name, moments, method, rows_XI, each, halves)
        kept_HR, narrower = site.groups_HD[:, :each], width < site.width
        recovery = rotated_qk(at_site.recovery) if method.rotates and narrower else at_site.recovery
        maps = (recovery.q_map_HRD, recovery.k_map_HRD)
        mapped = tuple(
            Mapped(
                rows=side.rows,
                rows_HD=side.rows_HD.to(map_HRD.device),
                map_HRD=map_HRD,
                weight=_weight(site, side.rows.weight),
                bias=_weight(site, side.rows.bias),
            )
            for side, map_HRD in zip((site.queries, site.keys), maps, strict=True)
        )
        return TracedReduced(
            modules={},
            reports=[qk_report(site.name, site.groups_HD.shape[1], at_site, method, each, held_out)],
            kept_K=kept_HR.flatten().sort().values,
            mapped=mapped if narrower else (),
        )

    def completed(
        self, site: TracedPairs, new: TracedReduced, moments: Moments, method: Method, where: torch.device
    ) -> TracedReduced:
        return new

    def elimination(self, site: TracedPairs, moments: HeadMoments, method: Method) -> None:
        """There is none."""

    def curves(self, site: TracedPairs, moments: HeadMoments, method: Method, known: object) -> list[ErrorCurve]:
        """What each width loses of the logits."""
        widths = self.offers(site, method)
        if len(widths) == 1:
            return []
        errors = [self.reduced(site, moments, method, width).reports[0].error for width in widths[:-1]]
        return [ErrorCurve(errors=(*errors, 0.0), alone=widths, places=tuple(range(len(widths))))]

    def layer(self, site: TracedPairs, layer: nn.Module, method: Method, width: int) -> NoReturn:
        raise BadInput(f"{site.name}: a site of a traced model is no layer that could be timed alone; budget --macs")

    def rebuilt(self, branch: object, site: TracedPairs, *rest: object) -> NoReturn:
        raise BadInput(f"{site.name}: of a traced model no block is known that a loop could follow; drop --closed-loop")

    def fitted(self, step: object, site: TracedPairs, *rest: object) -> NoReturn:
        self.rebuilt(step, site)


def _weight(site: TracedPairs, name: str) -> Tensor:
    return site.program.tensor(name).detach().double()


def _rows(site: TracedPairs, side: Side) -> Tensor:
    """[H,D,I]"""
    return _weight(site, side.rows.weight).flatten(1)[side.rows_HD]
