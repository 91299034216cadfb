"""Addition of the moments of several image sets, and subtraction of a part's moments."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ground.errors import BadInput

from .fingerprints import Fingerprints, no_ids
from .moments import Moments, OneKind, SiteMoments

MUST_MATCH = ("model", "preprocessing", "dtype", "merging")
NOT_SUMS = ("eps", "kept_HK", "taps", "channels_GR")


def merge_lineage(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, str]:
    """Return the lineage of a sum: equal values, others joined as `x+y`. Raises BadInput where MUST_MATCH differs."""
    for key in MUST_MATCH:
        if a.get(key) != b.get(key):
            raise BadInput(
                f"moments to merge: {key} differs, got {a.get(key)!r} and {b.get(key)!r}; "
                f"calibrate both with the same {key}"
            )
    parts = {key: {*a.get(key, "").split("+"), *b.get(key, "").split("+")} - {""} for key in sorted({*a, *b})}
    return {key: a[key] if key in a and a[key] == b.get(key) else "+".join(sorted(parts[key])) for key in parts}


def _merge_images(a: Moments, b: Moments) -> Fingerprints:
    if not len(a.image_ids) or not len(b.image_ids):
        return Fingerprints()
    common = int(torch.isin(a.image_ids, b.image_ids).sum())
    if common:
        raise BadInput(
            f"moments to merge: {common} of {a.images} images are in both, so they would count twice; "
            "calibrate on image sets that do not overlap"
        )
    return Fingerprints.concatenated([a.fingerprints, b.fingerprints]).sorted()


def _merge_groups(a: Moments, b: Moments, ids: Tensor) -> tuple[Tensor, Moments | None]:
    if not len(a.group_ids) or not len(b.group_ids):  # they may have been found in one part alone
        return no_ids(), None
    groups = torch.cat([a.group_ids, b.group_ids])[torch.cat([a.image_ids, b.image_ids]).argsort(stable=True)]
    if a.half is None or b.half is None:
        return groups, None
    half = merge_moments(a.half, b.half)
    inside = torch.isin(ids, half.image_ids)
    both = int(torch.isin(groups[inside].unique(), groups[~inside]).sum())
    if both:
        raise BadInput(
            f"moments to merge: {both} groups of the same name are in both but were held out in only one; give "
            "different groups different names, or calibrate all images at once"
        )
    return groups, half


def add_statistics(name: str, a: OneKind, b: OneKind) -> OneKind:
    """Return the sum of two sets' statistics. Raises BadInput where fields that are no sums (eps, kept dims) differ."""
    if type(a) is not type(b):
        raise BadInput(f"{name}: moments to merge are {type(a).__name__} and {type(b).__name__}")
    merged: dict[str, Any] = {}
    for f in fields(a):
        left, right = getattr(a, f.name), getattr(b, f.name)
        if f.name in NOT_SUMS:
            same = torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else left == right
            if not same:
                covered = "the dims or channels that they cover; choose these for both by the moments of one first pass"
                how = covered if isinstance(left, Tensor) or isinstance(right, Tensor) else f"got {left} and {right}"
                raise BadInput(f"{name}: moments to merge differ in {f.name}, {how}")
            merged[f.name] = left
        elif (left is None) != (right is None):
            raise BadInput(f"{name}: only one of the moments to merge has {f.name}; calibrate both with or without it")
        elif isinstance(left, Tensor) and left.shape != right.shape:
            raise BadInput(f"{name}.{f.name}: moments to merge are {list(left.shape)} and {list(right.shape)}")
        else:
            merged[f.name] = None if left is None else left + right
    return replace(a, **merged)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of both image sets together.

    Raises BadInput for different sites, models, preprocessing or dtypes, and for common images.
    """
    if set(a.sites) != set(b.sites):
        unmatched = sorted(set(a.sites) ^ set(b.sites))
        raise BadInput(f"moments to merge: these sites are in only one of them: {', '.join(unmatched)}")
    lineage, fingerprints = merge_lineage(a.lineage, b.lineage), _merge_images(a, b)
    groups, half = _merge_groups(a, b, fingerprints.ids)
    sites = {name: add_statistics(name, a.sites[name], b.sites[name]) for name in a.sites}
    images = a.images + b.images
    return Moments(sites=sites, lineage=lineage, images=images, fingerprints=fingerprints, group_ids=groups, half=half)


def subtract_statistics(site: OneKind, part: OneKind) -> OneKind:
    values: dict[str, Any] = {each.name: getattr(site, each.name) for each in fields(site)}
    differences = {
        name: value - getattr(part, name)
        for name, value in values.items()
        if value is not None and name not in NOT_SUMS
    }
    return replace(site, **differences)


def moments_without(total: Moments, part: Moments) -> Moments:
    """Return the moments of the images of `total` that are not in `part`.

    The result has no `half` and no per-image systems. Raises BadInput unless `part` holds some, but not all, images of
    `total` and no others.
    """
    inside_N, remaining_N = torch.isin(part.image_ids, total.image_ids), ~torch.isin(total.image_ids, part.image_ids)
    if not len(inside_N) or not inside_N.all() or not remaining_N.any():
        raise BadInput(
            f"moments to subtract: {int(inside_N.sum())} of {part.images} images are among the {total.images}; "
            "expected all of them, and fewer than the total"
        )
    sites = {
        name: subtract_statistics(_without_system(total.sites[name]), _without_system(site))
        for name, site in part.sites.items()
    }
    groups = total.group_ids[remaining_N] if len(total.group_ids) else total.group_ids
    fingerprints = total.fingerprints.select(remaining_N)
    return Moments(
        sites=sites, lineage=total.lineage, images=len(fingerprints), fingerprints=fingerprints, group_ids=groups
    )


def _without_system(site: SiteMoments) -> SiteMoments:
    systems = {"system_HTT", "kept_HK", "target_HKK", "target_energy_H"} & {each.name for each in fields(site)}
    cleared: dict[str, Any] = dict.fromkeys(systems)
    return replace(site, **cleared)
