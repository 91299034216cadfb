"""The statistics that a site has in a moments file. Version 0.1 had one name for all of an attention, an MLP's for what
its last layer reads.
"""

import torch

from calib.active import ACTIVE_EPS
from calib.moments import ChannelMoments, HeadMoments, Moments, OneKind, SiteMoments, on_device
from corp_deploy.traced.models.sites import Site
from ground.errors import BadInput


def lacking(site: str, of: str = "this site") -> BadInput:
    """What is raised where moments were taken without what a site needs of them."""
    return BadInput(f"{site}: the moments hold no statistics of {of}; calibrate again without leaving it out")


def statistics_at(site: Site, moments: Moments, kind: type[OneKind], device: torch.device) -> OneKind:
    """Under the site's own name, on the device. Raises BadInput when the moments were taken without it."""
    statistics = moments.sites.get(site.name) or moments.sites.get(site.name.removesuffix(".qk"))
    if not isinstance(statistics, kind):
        raise lacking(site.name)
    return on_device(statistics, device)


def statistics_before(site: str, layer: str, moments: Moments) -> SiteMoments | None:
    """Of what a layer reads that is the only one to read a site."""
    older = None if layer in moments.sites else moments.sites.get(site.removesuffix(".v"))
    if not isinstance(older, HeadMoments):
        return older or moments.sites.get(layer)
    return ChannelMoments(
        tokens=older.tokens,
        eps=ACTIVE_EPS,
        sum_F=older.z_sum_C,
        gram_FF=older.zz_CC,
        active_F=torch.zeros_like(older.z_sum_C),
    )
