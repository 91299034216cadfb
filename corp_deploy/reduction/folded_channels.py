"""Channel sites with merged channels, and what merged layers that are modules give.

Legend: B images, N tokens, I inputs and O outputs of the site, K merged channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from calib.hooks import listening
from calib.moments import ChannelMoments
from calib.sites import ChannelTaps
from corp_deploy.algebra.fold import fold, recovered_from_gram
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.modules import with_modules

from .channel_modules import layers_of, placed
from .channels import ChannelLayers
from .judged_folds import Fitted, Folded
from .method import Method


class FoldedModules(Folded, Protocol):
    """A site of modules."""

    def modules(self, weight_OK: Tensor, bias_O: Tensor) -> Mapping[str, nn.Module]:
        """The site's new modules by name, with this last layer."""
        ...

    def last(self, modules: Mapping[str, nn.Module]) -> nn.Linear:
        """The last layer among them."""
        ...

    def layer(self, modules: Mapping[str, nn.Module]) -> nn.Module:
        """The whole layer with these modules for its own."""
        ...


def given_by(folded: FoldedModules) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of the inputs [B,N,I] and outputs [B,N,O] of a dense site: what the merged layers give to the last one, and what
    plain folding lacks of the outputs.
    """
    modules = folded.modules(folded.plain_OK, folded.bias_O)
    layer, last = folded.layer(modules), folded.last(modules)

    def given(u_BNI: Tensor, y_BNO: Tensor) -> tuple[Tensor, Tensor]:
        heard: list[Tensor] = []
        with listening([ChannelTaps(name="", output=last)], lambda _, __, z_BNK: heard.append(z_BNK)):
            lacking_BNO = y_BNO - layer(u_BNI)
        return heard[0], lacking_BNO

    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedChannels:
    """See FoldedModules."""

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
    def foretold(self) -> Fitted:
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
