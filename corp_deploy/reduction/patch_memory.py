"""Calibration within a memory: of which channels the largest convolutions' patches are summed.

Which ones is told by weights alone, before any image is seen: by the norm of the row that writes a channel times that
of what reads it.

Legend: G groups of a convolution, P outputs of each, C channels of each, U columns of their weights, F = G C, X weights
that write a channel, R channels chosen of each group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.memory import patch_channels_that_fit, shapes_of_sites
from calib.sites import PatchTaps, Site
from corp_deploy.families.family import example_of, listened, sites_of
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.sites import TracedConvolutions, TracedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A convolution of which channels may go without patches: each group of it is to keep as many, and nothing else
    holds channels together. `weight_GPU` and `writing_FX`: what reads and what writes them.
    """

    taps: PatchTaps
    weight_GPU: Tensor
    writing_FX: Tensor

    def strongest(self, count: int) -> Tensor:
        """So many channels of each group [G,R], ascending, by what weights say of them."""
        groups, columns = len(self.weight_GPU), self.taps.places
        read_GC = self.weight_GPU.unflatten(-1, (-1, columns)).square().sum(dim=(1, 3)).sqrt()
        written_GC = torch.linalg.vector_norm(self.writing_FX, dim=1).view(groups, -1)
        score_GC: Tensor = read_GC * written_GC
        return score_GC.topk(count, dim=1).indices.sort(dim=1).values


def _of_site(site: TracedConvolutions) -> Iterator[Place]:
    """Where one convolution reads all of a site, channel by channel, and nothing beside it."""
    every = [each for each in site.readings if not each.is_squeeze]
    layer, columns_GM = every[0].layer, every[0].columns_GM
    if len(every) > 1 or not isinstance(layer, nn.Conv2d) or site.parts != layer.groups:
        return
    if columns_GM.shape == (layer.in_channels, 1):
        weight = every[0].gained_weight
        writing_FX = torch.empty_like(written_FX := site.writing_GX())
        writing_FX[torch.from_numpy(columns_GM[:, 0]).to(writing_FX.device)] = written_FX
        weight_GPU = weight.flatten(1).view(layer.groups, len(weight) // layer.groups, -1)
        yield Place(taps=PatchTaps(name=every[0].name, output=layer), weight_GPU=weight_GPU, writing_FX=writing_FX)


def _places(model: nn.Module) -> dict[str, Place]:
    """By the names of their statistics."""
    sites = (site for site in sites_of(model).every if isinstance(site, TracedConvolutions))
    return {place.taps.name: place for site in sites for place in _of_site(site)}


def without_streams(model: nn.Module, taps: Sequence[Site]) -> list[Site]:
    """Without what a traced model's streams alone are read by, whose channels all need patches."""
    own = [site for site in sites_of(model).every if not isinstance(site, TracedStream)]
    tap_names = {tap.name for site in own for tap in site.listening()}
    return [tap for tap in taps if tap.name in tap_names]


def within_memory(model: nn.Module, taps: Sequence[Site], bytes_of_sums: int) -> list[Site]:
    """The same sites, convolutions with patches of fewer channels where all sums would take more than that. Raises
    BadInput where even the fewest take more.
    """
    places = _places(model)
    shapes = shapes_of_sites(listened(model), taps, example=example_of(model), device=device(model))
    fixed = sum(shape.bytes_of_moments() for name, shape in shapes.items() if name not in places)
    free = {name: shape for name, shape in shapes.items() if name in places}
    counts = patch_channels_that_fit(free, bytes_of_sums - fixed) if free else {}
    fewer = {name: places[name].taps.with_patches_of(places[name].strongest(count)) for name, count in counts.items()}
    return [fewer.get(tap.name, tap) for tap in taps]
