"""The memory that a calibration's sums need, computed before it runs."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .axes import shape_of, sum_names, triangle_size
from .inputs import Inputs, run_model, to_device
from .moments import ChannelMoments, HeadMoments, SiteMoments
from .patch_moments import PatchMoments
from .sites import ChannelTaps, HeadTaps, PatchTaps, Role, Site, SiteKind, evaluating, listening_to_sites

FLOAT64_BYTES = 8
LEAST_CHANNELS = 8
CGROUP = Path("/sys/fs/cgroup")


ObservedShapes = Callable[[Role], torch.Size]
"""A function from a role to the shape of the site's activation; raises KeyError if the site had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a site's axes by letter, `names` of optional sums, and the tokens or output pixels of an input."""

    moments: type[SiteMoments]
    tokens: int
    sizes: Mapping[str, int]
    names: tuple[str, ...] = ()

    def bytes_of_moments(self) -> int:
        return _bytes_of((*sum_names(self.moments), *self.names), self.sizes)

    def bytes_of_system(self, *, kept: int | None = None) -> int:
        """Return the bytes of CORP's per-image system, for all dims or `kept` dims of each head; 0 for other kinds."""
        if self.moments is not HeadMoments:
            return 0
        width = self.sizes["D"] if kept is None else kept
        restricted = () if kept is None else ("target_HKK", "target_energy_H")
        return _bytes_of(("system_HTT", *restricted), {"H": self.sizes["H"], "K": width, "T": triangle_size(width)})

    def with_patches_of(self, channels: int) -> "Shape":
        sizes = {**self.sizes, "R": channels, "U": channels * self.sizes["T"]}
        return replace(self, sizes=sizes, names=("cross_GPU",))


def _bytes_of(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return FLOAT64_BYTES * sum(prod(shape_of(name, sizes)) for name in names)


def _channel_shape(_: ChannelTaps, observed: ObservedShapes) -> Shape:
    tokens, hidden = observed("x")[1:]
    return Shape(moments=ChannelMoments, tokens=tokens, sizes={"F": hidden})


def _head_shape(site: HeadTaps, observed: ObservedShapes) -> Shape:
    heads, tokens, dim = observed("q")[-3:]
    names = ("plane_gram_HXX",) if site.causal and site.plane_scale is not None else ()
    sizes = {"H": heads, "D": dim, "X": dim, "C": observed("z")[-1]}
    return Shape(moments=HeadMoments, tokens=tokens, sizes=sizes, names=names)


def _patch_shape(site: PatchTaps, observed: ObservedShapes) -> Shape:
    *_, rows, columns = observed("y")
    names = () if site.channels_GR is None else ("cross_GPU",)
    return Shape(moments=PatchMoments, tokens=rows * columns, sizes=site.sizes, names=names)


_SHAPES: Mapping[SiteKind, Callable[[Any, ObservedShapes], Shape]] = {
    "mlp": _channel_shape,
    "attention": _head_shape,
    "convolution": _patch_shape,
}


def shapes_of_sites(
    model: nn.Module, sites: Sequence[Site], *, example: Inputs, device: torch.device | str
) -> dict[str, Shape]:
    """Return the shapes of sites, observed on an example; on the device `meta` the run computes nothing."""
    observed: dict[tuple[str, Role], torch.Size] = {}

    def on_activation(name: str, role: Role, activation: Tensor) -> None:
        observed[name, role] = activation.shape

    with torch.no_grad(), evaluating(model), listening_to_sites(sites, on_activation):
        run_model(model, to_device(example, device))
    shapes: dict[str, Shape] = {}
    for site in sites:
        own = {role: size for (name, role), size in observed.items() if name == site.name}
        try:
            shapes[site.name] = _SHAPES[site.kind](site, own.__getitem__)
        except KeyError as error:
            raise BadInput(f"{site.name}: its modules never ran in a forward pass of this model") from error
    return shapes


def bytes_needed(
    shapes: Mapping[str, Shape], *, attention_system: bool = False, kept: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the bytes of each site's sums; `kept` by site: the dims per head that its per-image system covers."""
    kept = kept or {}
    return {
        name: shape.bytes_of_moments()
        + (shape.bytes_of_system(kept=kept.get(name)) if attention_system or name in kept else 0)
        for name, shape in shapes.items()
    }


def patch_channels_that_fit(
    shapes: Mapping[str, Shape], available: int, *, free: Collection[str] | None = None
) -> Mapping[str, int]:
    """Return, by name of a convolution, the channels per group that its patches may cover so that all sums fit.

    As few sites as possible are restricted to fit `available` bytes, and only these are returned: the largest first,
    none below LEAST_CHANNELS, and only sites in `free` unless it is None. Raises BadInput where nothing fits.
    """
    total = sum(bytes_needed(shapes).values())
    named = _choose_restricted(shapes, total, available, shapes if free is None else free)
    while total > available:
        name = max(named, key=lambda each: (named[each].sizes["R"] > LEAST_CHANNELS, named[each].bytes_of_moments()))
        fewer = named[name].with_patches_of(named[name].sizes["R"] - 1)
        total += fewer.bytes_of_moments() - named[name].bytes_of_moments()
        named[name] = fewer
    return {name: shape.sizes["R"] for name, shape in named.items() if shape.names}


def _choose_restricted(
    shapes: Mapping[str, Shape], total: int, available: int, free: Collection[str]
) -> dict[str, Shape]:
    wide = {name: shape for name, shape in shapes.items() if shape.moments is PatchMoments and name in free}
    narrow = {name: shape.with_patches_of(LEAST_CHANNELS) for name, shape in wide.items()}
    saved = {name: wide[name].bytes_of_moments() - narrow[name].bytes_of_moments() for name in wide}
    order = sorted((name for name in wide if saved[name] > 0), key=lambda name: -wide[name].bytes_of_moments())
    count = next(
        (count for count in range(len(order) + 1) if total - sum(saved[name] for name in order[:count]) <= available),
        None,
    )
    if count is None:
        least = total - sum(saved[name] for name in order)
        raise BadInput(
            f"moments: {len(shapes)} sites need more than --patch-memory {available / 1e9:g}, also with patches of "
            f"{LEAST_CHANNELS} channels a group; give at least --patch-memory {1.01 * least / 1e9:.3g}, or calibrate "
            "fewer sites at a time (--sites)"
        )
    return {name: wide[name] for name in order[:count]}


def bytes_available(device: torch.device | str) -> int:
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo, limit, used = Path("/proc/meminfo"), CGROUP / "memory.max", CGROUP / "memory.current"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def refuse_too_large(needed: Mapping[str, int], available: int) -> None:
    total = sum(needed.values())
    if total > available:
        largest = max(needed, key=lambda name: needed[name])
        raise BadInput(
            f"moments: {len(needed)} sites need {total / 1e9:.2f} GB, {available / 1e9:.2f} GB are available; the "
            f"largest is {largest} with {needed[largest] / 1e9:.2f} GB; (a) leave out the attention system, or "
            "collect it for kept dims only, (b) calibrate fewer sites at a time, (c) use a larger machine"
        )
