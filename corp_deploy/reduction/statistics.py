"""The statistics that a site of linear layers has in a moments file."""

import torch

from calib.moments import Moments, OneKind, on_device
from corp_deploy.families.site import Site
from ground.errors import BadInput


def statistics_at(site: Site, moments: Moments, kind: type[OneKind], device: torch.device) -> OneKind:
    """Under the site's own name, on the device. Raises BadInput when the moments were taken without it."""
    statistics = moments.sites.get(site.name)
    if not isinstance(statistics, kind):
        raise BadInput(
            f"{site.name}: the moments hold no statistics of this site; calibrate again without leaving it out"
        )
    return on_device(statistics, device)
