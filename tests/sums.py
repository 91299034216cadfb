"""Moments against moments."""

from dataclasses import fields

import pytest
from torch import Tensor

from calib.moments import Moments, SiteMoments

PRODUCTS = ("gram_FF", "zz_CC")  # made of several inputs at once, in float32


def sums_of(site: SiteMoments) -> dict[str, Tensor]:
    """By name."""
    values = ((each.name, getattr(site, each.name)) for each in fields(site))
    return {name: value for name, value in values if isinstance(value, Tensor) and value.is_floating_point()}


def assert_equal(a: Moments, b: Moments, limit: float = 1e-9, *, shared: float | None = None) -> None:
    """Of the same inputs, each sum to that share of its norm, PRODUCTS to the share `shared`; to the bit by the same
    lineage where that is 0.
    """
    assert (a.images, list(a.sites), a.image_ids.tolist()) == (b.images, list(b.sites), b.image_ids.tolist())
    assert limit or dict(a.lineage) == dict(b.lineage)
    for name, site in a.sites.items():
        for each in fields(site):
            x, y = getattr(site, each.name), getattr(b.sites[name], each.name)
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                most = limit if shared is None or each.name not in PRODUCTS else shared
                assert float((x - y).double().norm()) <= most * float(y.double().norm()), (name, each.name)
            else:
                assert x == y or x == pytest.approx(y, rel=1e-12 if limit else 0.0), (name, each.name)
