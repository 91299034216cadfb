"""The statistics of a row of convolutions: of the patches that each one reads, and of the means that squeezes read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from calib.combination import without
from calib.moments import ChannelMoments, Moments, on_device
from calib.patch_moments import PatchMoments
from corp_deploy.families.conv_site import ConvSite
from ground.errors import BadInput

OfPart = TypeVar("OfPart", PatchMoments, ChannelMoments)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMoments:
    """By the names of the parts in the block."""

    patches: Mapping[str, PatchMoments]
    means: Mapping[str, ChannelMoments]

    def less(self, half: "RowMoments") -> "RowMoments":
        """Those of the images that `half`, of some of the same ones, is not of."""
        return RowMoments(
            patches={name: without(own, half.patches[name]) for name, own in self.patches.items()},
            means={name: without(own, half.means[name]) for name, own in self.means.items()},
        )


def _of_parts(
    site: ConvSite, names: Iterable[str], moments: Moments, kind: type[OfPart], device: torch.device
) -> dict[str, OfPart]:
    found: dict[str, OfPart] = {}
    for name in names:
        own = moments.sites.get(site.tap_name(name))
        if not isinstance(own, kind):
            raise BadInput(
                f"{site.tap_name(name)}: the moments hold no statistics of what enters it; calibrate again without "
                "leaving it out"
            )
        found[name] = on_device(own, device)
    return found


def row_moments(site: ConvSite, moments: Moments, device: torch.device) -> RowMoments:
    """Raises BadInput when the moments were taken without a part of them."""
    readers = [each.reader for each in site.between]
    squeezes = [name for each in site.between for name in site.squeezes(each)]
    return RowMoments(
        patches=_of_parts(site, readers, moments, PatchMoments, device),
        means=_of_parts(site, squeezes, moments, ChannelMoments, device),
    )
