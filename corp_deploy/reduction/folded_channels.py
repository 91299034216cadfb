"""Sites with merged channels: fitted to, and judged by, what the merged layers really give.

A mean row's activation is not the mean of its members' activations, and no moment of the dense model tells what it is.
So every merged layer is shown what its dense one gets and gives.

Legend: B images, N tokens, I inputs and O outputs of the site, K merged channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from calib.hooks import listening
from calib.moments import ChannelMoments
from calib.sites import ChannelTaps
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.fold import fold, recovered_from_gram
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.algebra.regression_sums import RegressionSums
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.modules import with_modules

from .channel_modules import layers_of, placed
from .channels import ChannelLayers
from .method import Method

See = Callable[[Tensor, Tensor, bool], None]
"""Told the inputs [B,N,I] and outputs [B,N,O] of a dense site, and whether these images are held out."""
Show = Callable[[Mapping[str, See]], None]
"""Shows the images' activations at the named sites to who is to see them."""


class Folded(Protocol):
    """One site at one width: its merged first layer and the two last layers that need no images."""

    @property
    def refits(self) -> bool:
        """Whether the last layer is fitted to what the merged ones give, and not as the dense statistics foretell."""
        ...

    @property
    def plain_OK(self) -> Tensor: ...

    @property
    def bias_O(self) -> Tensor: ...

    @property
    def foretold(self) -> "Fitted":
        """As the dense statistics have it."""
        ...

    def modules(self, weight_OK: Tensor, bias_O: Tensor) -> Mapping[str, nn.Module]:
        """The site's new modules by name, with this last layer."""
        ...

    def last(self, modules: Mapping[str, nn.Module]) -> nn.Linear:
        """The last layer among them."""
        ...

    def layer(self, modules: Mapping[str, nn.Module]) -> nn.Module:
        """The whole layer with these modules for its own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedChannels:
    """See Folded."""

    refits: bool
    site: ChannelSite
    dense: nn.Module
    layers: ChannelLayers
    first_KI: Tensor
    first_bias_K: Tensor
    plain_OK: Tensor
    recovered_OK: Tensor
    condition: float
    ridge: float

    def modules(self, weight_OK: Tensor, bias_O: Tensor) -> Mapping[str, nn.Module]:
        return placed(self.site, self.first_KI, self.first_bias_K, weight_OK, bias_O)

    def last(self, modules: Mapping[str, nn.Module]) -> nn.Linear:
        last = modules[self.site.last_name]
        assert isinstance(last, nn.Linear), self.site.name
        return last

    def layer(self, modules: Mapping[str, nn.Module]) -> nn.Module:
        return with_modules(self.dense, self.site.name, dict(modules))

    @property
    def foretold(self) -> "Fitted":
        return self.recovered_OK, self.bias_O, self.condition, self.ridge

    @property
    def bias_O(self) -> Tensor:
        bias_O = self.layers.second_bias_O
        return self.plain_OK.new_zeros(self.plain_OK.shape[0]) if bias_O is None else bias_O


def folded_channels(
    site: ChannelSite, dense: nn.Module, moments: ChannelMoments, method: Method, width: int
) -> FoldedChannels:
    """Merge one site's channels; `dense` is the whole layer."""
    layers = layers_of(site)
    folding = fold(layers.first_FI, layers.first_bias_F, layers.second_OF, width)
    solved = recovered_from_gram(folding, moments.second_FF, layers.second_OF, ridge_rel=method.ridge_rel)
    return FoldedChannels(
        refits=method.mlp_recovery == "refit",
        site=site,
        dense=dense,
        layers=layers,
        first_KI=folding.weight_KI,
        first_bias_K=folding.bias_K,
        plain_OK=folding.plain_OK,
        recovered_OK=solved.solution_OK,
        condition=solved.condition,
        ridge=solved.ridge,
    )


class _Fit:
    """The regression of what plain folding lacks of the dense output on the merged activations."""

    def __init__(self, folded: Folded) -> None:
        modules = folded.modules(folded.plain_OK, folded.bias_O)
        self.layer, self.last = folded.layer(modules), folded.last(modules)
        self.sums = RegressionSums.for_layer(self.last)

    def see(self, u_BNI: Tensor, y_BNO: Tensor, held_out: bool) -> None:
        if held_out:
            return
        heard: list[Tensor] = []
        with listening([ChannelTaps(name="", output=self.last)], lambda _, __, z_BNK: heard.append(z_BNK)):
            lacking_BNO = y_BNO - self.layer(u_BNI)
        self.sums.add(heard[0], lacking_BNO)


class _Loss:
    """E||y - y'||^2 per token of a layer, on the calibration images and on those held out."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.sums, self.tokens = [0.0, 0.0], [0, 0]

    def see(self, u_BNI: Tensor, y_BNO: Tensor, held_out: bool) -> None:
        self.sums[held_out] += float((y_BNO - self.layer(u_BNI)).double().square().sum())
        self.tokens[held_out] += y_BNO.shape[:-1].numel()

    def error(self, *, held_out: bool) -> float:
        return self.sums[held_out] / self.tokens[held_out]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFold:
    """The new layers by module name, what they lose, and on held-out images."""

    modules: Mapping[str, nn.Module]
    recovery: ChannelRecovery
    error_held_out: float | None


Fitted = tuple[Tensor, Tensor, float, float]
"""Second weight and bias, with the condition and ridge of their solve."""


def _refitted(folded: Folded, fit: _Fit, ridge_rel: float) -> Fitted:
    refit = refit_toward(torch.zeros_like(folded.plain_OK), fit.sums.regression(), strength=ridge_rel)
    return folded.plain_OK + refit.weight_OK, folded.bias_O + refit.bias_O, refit.condition, refit.ridge


def _fitted(every: Mapping[str, Folded], method: Method, show: Show) -> dict[str, Fitted]:
    fits = {name: _Fit(each) for name, each in every.items() if each.refits}
    if fits:
        show({name: fit.see for name, fit in fits.items()})
    return {
        name: _refitted(each, fits[name], method.ridge_rel) if name in fits else each.foretold
        for name, each in every.items()
    }


class _Trial:
    """The layers that ship and those of plain folding, side by side."""

    def __init__(self, folded: Folded, fitted: Fitted) -> None:
        self.fitted = fitted
        self.modules = folded.modules(*fitted[:2])
        self.shipped = _Loss(folded.layer(self.modules))
        self.plain = _Loss(folded.layer(folded.modules(folded.plain_OK, folded.bias_O)))

    def see(self, u_BNI: Tensor, y_BNO: Tensor, held_out: bool) -> None:
        self.shipped.see(u_BNI, y_BNO, held_out)
        self.plain.see(u_BNI, y_BNO, held_out)

    def judged(self) -> JudgedFold:
        weight_OK, bias_O, condition, ridge = self.fitted
        error, plain = self.shipped.error(held_out=False), self.plain.error(held_out=False)
        recovery = ChannelRecovery(
            weight_OK=weight_OK,
            bias_O=bias_O,
            residual=error,
            residual_uncompensated=plain,
            r2=1.0 - error / plain if plain > 0.0 else 1.0,
            condition=condition,
            ridge=ridge,
        )
        others = self.shipped.error(held_out=True) if self.shipped.tokens[True] else None
        return JudgedFold(modules=self.modules, recovery=recovery, error_held_out=others)


def judged_folds(every: Mapping[str, Folded], method: Method, show: Show) -> dict[str, JudgedFold]:
    """The last layer of each, as published (`gram`) or fitted to what the merged ones give (`refit`: a ridge toward
    plain folding, the bias free), with the losses of the layers that ship.
    """
    trials = {name: _Trial(every[name], fitted) for name, fitted in _fitted(every, method, show).items()}
    show({name: trial.see for name, trial in trials.items()})
    return {name: trial.judged() for name, trial in trials.items()}
