"""Merged channels and heads: fitted to, and judged by, what the merged layers really give.

A mean row's activation is not the mean of its members' activations, and no moment of the dense model tells what it is.
So the last layer's inputs are summed up as the merged ones in front of it give them, with what is lacking of the dense
outputs; one regression tells of any weight what it loses.

Legend: B images, N tokens, U units (channels or heads), F columns of a layer, O its outputs, K merged channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.algebra.regression_sums import RegressionSums

from .method import Method
from .traced_change import Change
from .traced_reads import ReaderStats

See = Callable[[Tensor, Tensor, bool], None]
"""Told what merged layers give to the last one [B,N,K], what plain folding lacks of the dense outputs [B,N,O], and
whether these images are held out."""
Show = Callable[[Mapping[str, See]], None]
"""Shows the images' activations at the named sites to who is to see them."""
Fitted = tuple[Tensor, Tensor, float, float]
"""Second weight and bias, with the condition and ridge of their solve."""


PADDED = "{}: folded heads are judged on whole images, and these inputs have padding; rank heads: --select heads=obs"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFold:
    """The last layer, what it loses, and on held-out images."""

    recovery: ChannelRecovery
    error_held_out: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRead:
    """A layer behind merged units: its columns by unit, and of which those of the units kept. `refits`: whether it is
    fitted to what the merged ones give, and not as the dense statistics foretell; `foretold`: as they have it.
    """

    read: ReaderStats
    columns_UF: Tensor
    kept_K: Tensor
    refits: bool
    plain_OK: Tensor
    foretold: Fitted

    def deficit(self, dense: Tensor, merged: Tensor, there: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What merged units give to the layer, and what plain folding lacks of its outputs, of what enters it; `there`:
        of tokens those that are.
        """
        at_F = torch.from_numpy(self.read.portion.columns_CM).flatten().to(dense.device)
        z, z_merged = (there(self._by_place(x))[..., at_F] for x in (dense, merged))
        z_merged = z_merged[..., self.columns_UF[self.kept_K].flatten()]
        y, plain = (functional.linear(x, w.to(x)) for x, w in ((z, self.read.weight_OU), (z_merged, self.plain_OK)))
        return z_merged.flatten(0, -2)[None], (y - plain).flatten(0, -2)[None]

    def _by_place(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1) if self.read.is_of_maps else x

    def change(self, judged: JudgedFold) -> Change:
        """With the columns kept in their order."""
        order_K = self.columns_UF[self.kept_K].flatten().argsort()
        weight_OK = judged.recovery.weight_OK[:, order_K]
        return Change(read=self.read, recovery=replace(judged.recovery, weight_OK=weight_OK))


class _Sums:
    """What plain folding lacks of the dense output beside the merged activations."""

    def __init__(self, folded: FoldedRead) -> None:
        outputs, inputs = folded.plain_OK.shape
        where = folded.plain_OK.device
        self.fit, self.held_out = (RegressionSums.empty(inputs=inputs, outputs=outputs, device=where) for _ in range(2))

    def see(self, z_BNK: Tensor, lacking_BNO: Tensor, held_out: bool) -> None:
        (self.held_out if held_out else self.fit).add(z_BNK, lacking_BNO)


def _last(folded: FoldedRead, sums: RegressionSums, ridge_rel: float) -> Fitted:
    if not folded.refits:
        return folded.foretold
    sums = sums.uncentred() if folded.read.reading.is_biasless else sums
    refit = refit_toward(torch.zeros_like(folded.plain_OK), sums.regression(), strength=ridge_rel)
    return folded.plain_OK + refit.weight_OK, folded.read.bias_O + refit.bias_O, refit.condition, refit.ridge


def _judged(folded: FoldedRead, sums: _Sums, ridge_rel: float) -> JudgedFold:
    weight_OK, bias_O, condition, ridge = _last(folded, sums.fit, ridge_rel)

    def error(of: RegressionSums) -> float:
        return of.regression().error(weight_OK - folded.plain_OK, bias_O - folded.read.bias_O)

    left, plain = error(sums.fit), sums.fit.regression().target_square
    recovery = ChannelRecovery(
        weight_OK=weight_OK,
        bias_O=bias_O,
        residual=left,
        residual_uncompensated=plain,
        r2=1.0 - left / plain if plain > 0.0 else 1.0,
        condition=condition,
        ridge=ridge,
    )
    return JudgedFold(recovery=recovery, error_held_out=error(sums.held_out) if sums.held_out.x.tokens else None)


def judged_folds(every: Mapping[str, FoldedRead], method: Method, show: Show) -> dict[str, JudgedFold]:
    """The last layer of each, as published (`gram`) or fitted to what the merged ones give (`refit`: a ridge toward
    plain folding, the bias free), with what it loses.
    """
    sums = {name: _Sums(each) for name, each in every.items()}
    show({name: each.see for name, each in sums.items()})
    return {name: _judged(every[name], each, method.ridge_rel) for name, each in sums.items()}
