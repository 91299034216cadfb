"""The norm of a channel site that loses channels: the mean over all of them, from the norms of those that stay.

What scales a channel is its norm over the image by the mean of all channels' norms, of those too that are left out: it
is told of the norms that stay (algebra/shares.py), exactly where the others' are multiples of them.
"""

from dataclasses import replace

import torch

from calib.moments import ChannelMoments, Moments, on_device
from corp_deploy.algebra.shares import mean_from_kept
from corp_deploy.families.channel_site import ChannelSite
from ground.errors import BadInput

from .kind import LinearReduced


def norm_moments_of(site: ChannelSite, moments: Moments, device: torch.device) -> ChannelMoments:
    """The statistics of the channels' norms. Raises BadInput when the moments were taken without them."""
    statistics = moments.sites.get(site.norm_name)
    if not isinstance(statistics, ChannelMoments):
        raise BadInput(
            f"{site.norm_name}: the moments hold no statistics of the norms of {site.name}; calibrate again without "
            "leaving them out"
        )
    return on_device(statistics, device)


def with_norm(site: ChannelSite, new: LinearReduced, norms: ChannelMoments) -> LinearReduced:
    """The site's new modules with its norm of the channels that stay."""
    assert site.norm is not None, site.name
    assert new.kept_K is not None, site.name
    weight_F = site.norm.mean.weight.detach().double().squeeze(0)
    weight_K = mean_from_kept(norms.second_FF, weight_F, new.kept_K)
    norm = site.norm.narrowed(new.kept_K, weight_K[None])
    return replace(new, modules={**new.modules, site.norm_name: norm})
