"""Calibration within a memory: of which channels the largest convolutions' patches are summed.

Which ones is told by weights alone, before any image is seen: by the norm of the row that writes a channel times that
of what reads it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from calib.memory import patch_channels_that_fit, shapes_of_sites
from calib.sites import Site
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.family import example_of, listened, sites_of
from corp_deploy.families.modules import device

from .conv_modules import reading_of


def _places(model: nn.Module) -> dict[str, tuple[ConvSite, int]]:
    """Where channels may go without patches, by the names of their statistics: each group of the reading convolution
    is to keep as many, and nothing else holds channels together.
    """
    places = {}
    for site in sites_of(model).rows:
        for place, between in enumerate(site.between):
            reading = reading_of(site, place)
            if reading.unit == 1 and reading.groups == len(reading.weight_GPU):
                places[site.tap_name(between.reader)] = site, place
    return places


def strongest(site: ConvSite, place: int, count: int) -> Tensor:
    """So many channels of each group [G,R], ascending, by what weights say of them."""
    reading = reading_of(site, place)
    groups, taps = len(reading.weight_GPU), site.convolution(site.between[place].reader).taps
    read_GC = reading.weight_GPU.unflatten(-1, (-1, taps)).square().sum(dim=(1, 3)).sqrt()
    written_GC = torch.linalg.vector_norm(reading.writing_FX, dim=1).view(groups, -1)
    score_GC: Tensor = read_GC * written_GC
    return score_GC.topk(count, dim=1).indices.sort(dim=1).values


def within_memory(model: nn.Module, taps: Sequence[Site], bytes_of_sums: int) -> list[Site]:
    """The same sites, convolutions with patches of fewer channels where all sums would take more than that. Raises
    BadInput where even the fewest take more.
    """
    places = _places(model)
    shapes = shapes_of_sites(listened(model), taps, example=example_of(model), device=device(model))
    fixed = sum(shape.bytes_of_moments() for name, shape in shapes.items() if name not in places)
    free = {name: shape for name, shape in shapes.items() if name in places}
    counts = patch_channels_that_fit(free, bytes_of_sums - fixed) if free else {}
    fewer = {
        name: site.patches(place).with_patches_of(strongest(site, place, counts[name]))
        for name, (site, place) in places.items()
        if name in counts
    }
    return [fewer.get(tap.name, tap) for tap in taps]
