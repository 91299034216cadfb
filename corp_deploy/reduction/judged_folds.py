"""Merged channels and heads: fitted to, and judged by, what the merged layers really give.

A mean row's activation is not the mean of its members' activations, and no moment of the dense model tells what it is.
So the last layer's inputs are summed up as the merged ones in front of it give them, with what is lacking of the dense
outputs; one regression tells of any weight what it loses.

Legend: B images, N tokens, U units (channels or heads), F columns of a layer, O its outputs, K merged channels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.algebra.regression_sums import RegressionSums

from .traced_change import Change
from .traced_reads import ReaderStats

Fitted = tuple[Tensor, Tensor, float, float]
"""Second weight and bias, with the condition and ridge of their solve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRead:
    """A layer behind merged units: its columns by unit, and of which those of the units kept. `refits`: whether it is
    fitted to what the merged ones give, and not as the dense statistics foretell; `foretold`: as they have it. `fit`
    and `held_out`: what plain folding lacks of the dense output beside the merged activations, of what was seen.
    """

    read: ReaderStats
    columns_UF: Tensor
    kept_K: Tensor
    refits: bool
    plain_OK: Tensor
    foretold: Fitted
    fit: RegressionSums
    held_out: RegressionSums

    def see(self, dense: Tensor, merged: Tensor, there: Callable[[Tensor], Tensor], *, is_held_out: bool) -> None:
        """What enters the layer of some images; `there`: of tokens those that are."""
        at_F = torch.from_numpy(self.read.portion.columns_CM).flatten().to(dense.device)
        by_place = (x.movedim(1, -1) if self.read.is_of_maps else x for x in (dense, merged))
        z, z_merged = (there(x)[..., at_F] for x in by_place)
        z_merged = z_merged[..., self.columns_UF[self.kept_K].flatten()]
        y, plain = (functional.linear(x, w.to(x)) for x, w in ((z, self.read.weight_OU), (z_merged, self.plain_OK)))
        sums = self.held_out if is_held_out else self.fit
        sums.add(z_merged.flatten(0, -2)[None], (y - plain).flatten(0, -2)[None])

    def _last(self, ridge_rel: float) -> Fitted:
        if not self.refits:
            return self.foretold
        sums = self.fit.uncentred() if self.read.reading.is_biasless else self.fit
        refit = refit_toward(torch.zeros_like(self.plain_OK), sums.regression(), strength=ridge_rel)
        return self.plain_OK + refit.weight_OK, self.read.bias_O + refit.bias_O, refit.condition, refit.ridge

    def judged(self, ridge_rel: float) -> tuple[Change, float | None]:
        """The layer as published (`gram`) or fitted to what the merged ones give (`refit`: a ridge toward plain
        folding, the bias free), its columns kept in their order; and what it loses on held-out images.
        """
        weight_OK, bias_O, condition, ridge = self._last(ridge_rel)

        def error(of: RegressionSums) -> float:
            return of.regression().error(weight_OK - self.plain_OK, bias_O - self.read.bias_O)

        left, plain = error(self.fit), self.fit.regression().target_square
        recovery = ChannelRecovery(
            weight_OK=weight_OK[:, self.columns_UF[self.kept_K].flatten().argsort()],
            bias_O=bias_O,
            residual=left,
            residual_uncompensated=plain,
            r2=1.0 - left / plain if plain > 0.0 else 1.0,
            condition=condition,
            ridge=ridge,
        )
        return Change(read=self.read, recovery=recovery), error(self.held_out) if self.held_out.x.tokens else None
