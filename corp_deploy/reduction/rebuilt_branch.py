"""A branch's layer made anew from the statistics of what enters it on the model as reduced so far."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from calib.moments import ChannelMoments, HeadMoments
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.head_attention import HeadAttention
from corp_deploy.families.widths import HeadWidths

from .channels import mlp_at_site, output_energy
from .folded_mlp import See, folded_mlp, judged_mlps
from .method import Method
from .report import SiteReport
from .site import built_mlp, layers_of, mlp_report, reduced_attention
from .streams import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The new layer, its last linear layer, the modules to put into the model, and what to report.

    `kept_K`: the channels that stay of an MLP, None where they were merged and for attention.
    """

    layer: nn.Module
    last: nn.Linear
    modules: dict[str, nn.Module]
    reports: list[SiteReport]
    kept_K: Tensor | None = None


def rebuilt_attention(part: vit.HeadSite, moments: HeadMoments, method: Method, width: HeadWidths) -> Rebuilt:
    modules, reports = reduced_attention(part, moments, method, width)
    module = modules[part.name]
    assert isinstance(module, HeadAttention), (part.name, module)
    return Rebuilt(layer=module, last=module.proj, modules=modules, reports=reports)


def rebuilt_mlp(
    branch: vit.Branch, part: vit.ChannelSite, moments: ChannelMoments, streams: Streams, method: Method, width: int
) -> Rebuilt:
    """The streams are looked at only where channels are merged."""
    if method.merges:
        return _merged(branch, part, moments, streams, method, width)
    new = mlp_at_site(moments, layers_of(part), method, width)
    linears, report = built_mlp(part, new, moments, method)
    inside = {name.removeprefix(f"{part.name}."): linear for name, linear in linears.items()}
    layer = vit.replaced(branch.layer, inside)
    last = [*linears.values()][-1]
    return Rebuilt(layer=layer, last=last, modules={**linears}, reports=[report], kept_K=new.kept_K)


def _merged(
    branch: vit.Branch, part: vit.ChannelSite, moments: ChannelMoments, streams: Streams, method: Method, width: int
) -> Rebuilt:
    """Fitted and judged on the reduced stream."""
    folded = folded_mlp(part, branch.layer, moments, method, width)

    def show(sees: Mapping[str, See]) -> None:
        for pair in streams:
            entering_BNC = branch.norm(pair.reduced)
            sees[part.name](entering_BNC, branch.layer(entering_BNC), False)

    judged = judged_mlps({part.name: folded}, method, show)[part.name]
    report = mlp_report(part, method, judged.recovery, output_energy(moments, folded.layers), None)
    layer, last = folded.layer(judged.modules), [*judged.modules.values()][-1]
    return Rebuilt(layer=layer, last=last, modules={**judged.modules}, reports=[report])
