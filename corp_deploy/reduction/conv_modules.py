"""A row of convolutions in and out of a model: its dense ones as tensors, its new ones as modules with reports.

Legend: O outputs of a convolution, G its groups, P outputs of a group, U columns of a patch, K kept channels, R of a
squeeze.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments
from corp_deploy.families.channel_norm import ChannelNorm
from corp_deploy.families.conv_site import Between, ConvSite
from corp_deploy.families.convolution import Convolution
from corp_deploy.families.modules import with_modules
from corp_deploy.families.widths import ConvWidths

from .conv_channels import Kept, Reading
from .kind import Reduced
from .method import Method
from .report import HeldOut, SiteReport, ridge_fit
from .squeezes import narrowed_squeeze


def _flat(conv: Convolution) -> Tensor:
    """[G,P,U] in float64."""
    return conv.weight.detach().double().flatten(1).view(conv.groups, conv.out_channels // conv.groups, -1)


def _bias(conv: Convolution) -> Tensor:
    assert conv.bias is not None, conv
    return conv.bias.detach().double()


def reading_of(site: ConvSite, place: int) -> Reading:
    """The dense convolution behind one place of a row, and the rows that write its channels."""
    between = site.between[place]
    reader, writer = site.convolution(between.reader), site.convolution(between.writer)
    return Reading(
        weight_GPU=_flat(reader),
        bias_O=_bias(reader),
        writing_FX=writer.weight.detach().double().flatten(1),
        groups=site.groups(place),
        unit=site.unit(place),
    )


@dataclass(slots=True)
class Row:
    """The weights of a row on their way to fewer channels, float64: rows and columns are taken off as they are decided
    on; squeezes and norms are new modules, `kept` the outputs that stay of convolutions.
    """

    site: ConvSite
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    others: dict[str, nn.Module]
    kept: dict[str, Tensor]

    @classmethod
    def of(cls, site: ConvSite) -> "Row":
        convolutions = site.block.convolutions
        return cls(
            site=site,
            weights={name: conv.weight.detach().double() for name, conv in convolutions.items()},
            biases={name: _bias(conv) for name, conv in convolutions.items()},
            others={},
            kept={},
        )

    def narrow(self, between: Between, kept: Kept) -> None:
        """Between two convolutions: the channels that stay, and what reads them."""
        for name in (between.writer, *between.along):
            if name in self.weights:
                self.weights[name] = self.weights[name][kept.kept_K]
                self.biases[name] = self.biases[name][kept.kept_K]
                self.kept[name] = kept.kept_K
            part = self.site.block.get_submodule(name)
            if isinstance(part, ChannelNorm):
                self.others[name] = part.narrowed(kept.kept_K)
        kernel = self.site.convolution(between.reader).kernel_size
        self.weights[between.reader] = kept.weight_GPU.flatten(0, 1).unflatten(-1, (-1, *kernel))
        self.biases[between.reader] = kept.recovery.bias_O

    def change(self, name: str, changes: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add to the weights [P,U] and biases [P] of each group of a convolution."""
        weight_OU = torch.cat([weight_PU for weight_PU, _ in changes])
        self.weights[name] = self.weights[name] + weight_OU.view_as(self.weights[name])
        self.biases[name] = self.biases[name] + torch.cat([bias_P for _, bias_P in changes])

    def squeeze(self, name: str, kept_K: Tensor, moments: ChannelMoments, method: Method) -> None:
        """A squeeze that these channels pass, by the moments of what it reads."""
        self.others[name] = narrowed_squeeze(self.site.squeeze(name), kept_K, moments, method)

    def _convolution(self, name: str) -> nn.Module:
        dense, weight_OIHW = self.site.convolution(name), self.weights[name]
        inputs = len(weight_OIHW) if dense.is_depthwise else weight_OIHW.shape[1] * dense.groups
        return dense.empty(inputs, len(weight_OIHW)).fill_(weight_OIHW, self.biases[name])

    def reduced(self, reports: list[SiteReport]) -> Reduced:
        """What became of the site."""
        kept = {f"{self.site.name}.{name}": kept_K for name, kept_K in self.kept.items()}
        return Reduced(modules=self.modules(), reports=reports, kept=kept)

    def modules(self) -> dict[str, nn.Module]:
        """By their names in the model."""
        modules = {f"{self.site.name}.{name}": self._convolution(name) for name in self.weights}
        return modules | {f"{self.site.name}.{name}": other for name, other in self.others.items()}


def conv_report(
    site: ConvSite, place: int, method: Method, kept: Kept, energy: float, held_out: HeldOut | None
) -> SiteReport:
    """What happened at one place of a row; it is told by the convolution that writes the channels."""
    report = SiteReport(
        site=site.name,
        part=site.between[place].writer,
        width_dense=site.width.channels[place],
        width_asked=site.width.channels[place] * method.conv_kept,
        width=len(kept.kept_K),
        energy=energy,
        error_uncompensated=kept.recovery.residual_uncompensated,
        error=kept.recovery.residual,
        r2=kept.recovery.r2,
        condition=kept.recovery.condition,
        ridge=kept.recovery.ridge,
        held_out=held_out,
    )
    return replace(report, ridge_fit=ridge_fit(kept.ridge))


def random_like(site: ConvSite, width: ConvWidths) -> nn.Module:
    """The site's block at one width with random weights."""
    modules = site.at_width(width)
    for parameter in (each for module in modules.values() for each in module.parameters()):
        nn.init.normal_(parameter, std=0.02)
    return with_modules(site.block, site.name, modules).eval()
