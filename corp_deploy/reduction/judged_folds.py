"""Merged channels and heads: fitted to, and judged by, what the merged layers really give.

A mean row's activation is not the mean of its members' activations, and no moment of the dense model tells what it is.
So the last layer's inputs are summed up as the merged ones in front of it give them, with what is lacking of the dense
outputs; one regression tells of any weight what it loses.

Legend: B images, N tokens, O outputs of a site, K merged channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.algebra.regression_sums import RegressionSums

from .method import Method
from .uncentred import regression_uncentred

See = Callable[[Tensor, Tensor, bool], None]
"""Told what merged layers give to the last one [B,N,K], what plain folding lacks of the dense outputs [B,N,O], and
whether these images are held out."""
Show = Callable[[Mapping[str, See]], None]
"""Shows the images' activations at the named sites to who is to see them."""
Fitted = tuple[Tensor, Tensor, float, float]
"""Second weight and bias, with the condition and ridge of their solve."""


PADDED = "{}: folded heads are judged on whole images, and these inputs have padding; rank heads: --select heads=obs"


class Folded(Protocol):
    """One site at one width, its first layers merged, and the last layers that need no images."""

    @property
    def refits(self) -> bool:
        """Whether the last layer is fitted to what the merged ones give, and not as the dense statistics foretell."""
        ...

    @property
    def plain_OK(self) -> Tensor: ...

    @property
    def bias_O(self) -> Tensor: ...

    @property
    def is_biasless(self) -> bool:
        """Whether the last layer gets no bias."""
        ...

    @property
    def foretold(self) -> Fitted:
        """As the dense statistics have it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFold:
    """The last layer, what it loses, and on held-out images."""

    recovery: ChannelRecovery
    error_held_out: float | None


class _Sums:
    """What plain folding lacks of the dense output beside the merged activations."""

    def __init__(self, folded: Folded) -> None:
        outputs, inputs = folded.plain_OK.shape
        where = folded.plain_OK.device
        self.fit, self.held_out = (RegressionSums.empty(inputs=inputs, outputs=outputs, device=where) for _ in range(2))

    def see(self, z_BNK: Tensor, lacking_BNO: Tensor, held_out: bool) -> None:
        (self.held_out if held_out else self.fit).add(z_BNK, lacking_BNO)


def _last(folded: Folded, sums: RegressionSums, ridge_rel: float) -> Fitted:
    if not folded.refits:
        return folded.foretold
    sums = regression_uncentred(sums) if folded.is_biasless else sums
    refit = refit_toward(torch.zeros_like(folded.plain_OK), sums.regression(), strength=ridge_rel)
    return folded.plain_OK + refit.weight_OK, folded.bias_O + refit.bias_O, refit.condition, refit.ridge


def _judged(folded: Folded, sums: _Sums, ridge_rel: float) -> JudgedFold:
    weight_OK, bias_O, condition, ridge = _last(folded, sums.fit, ridge_rel)

    def error(of: RegressionSums) -> float:
        return of.regression().error(weight_OK - folded.plain_OK, bias_O - folded.bias_O)

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


def judged_folds(every: Mapping[str, Folded], method: Method, show: Show) -> dict[str, JudgedFold]:
    """The last layer of each, as published (`gram`) or fitted to what the merged ones give (`refit`: a ridge toward
    plain folding, the bias free), with what it loses.
    """
    sums = {name: _Sums(each) for name, each in every.items()}
    show({name: each.see for name, each in sums.items()})
    return {name: _judged(every[name], each, method.ridge_rel) for name, each in sums.items()}
