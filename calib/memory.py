"""What a calibration will hold, computed before it runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .inputs import Inputs, run_model, to_device
from .sites import ChannelTaps, HeadTaps, PatchTaps, Role, Site, SiteKind, evaluating, listening

FLOAT64_BYTES = 8
LEAST_CHANNELS = 8
CGROUP = Path("/sys/fs/cgroup")


ObservedShapes = Callable[[Role], torch.Size]
"""The shape that a site was fed in a role; raises KeyError where nothing came."""


class _NoSystem:
    __slots__ = ()

    def bytes_of_system(self, *, kept: int | None = None) -> int:
        """Channels and convolutions have no per-image system."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelShape(_NoSystem):
    tokens: int
    hidden: int

    @classmethod
    def of(cls, _: ChannelTaps, observed: ObservedShapes) -> Self:
        tokens, hidden = observed("x")[1:]
        return cls(tokens=tokens, hidden=hidden)

    def bytes_of_moments(self) -> int:
        """Float64 sums of one site, the attention system aside."""
        return FLOAT64_BYTES * (self.hidden**2 + 2 * self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """`dim` is that of q and k, `channels` that of z."""

    tokens: int
    heads: int
    dim: int
    channels: int
    planes: bool = False

    @classmethod
    def of(cls, taps: HeadTaps, observed: ObservedShapes) -> Self:
        heads, tokens, dim = observed("q")[-3:]
        planes = taps.causal and taps.plane_scale is not None
        return cls(tokens=tokens, heads=heads, dim=dim, channels=observed("z")[-1], planes=planes)

    def bytes_of_moments(self) -> int:
        """Float64 sums of one site, the attention system aside."""
        heads = self.heads * ((3 + self.planes) * self.dim**2 + 3 * self.dim)
        return FLOAT64_BYTES * (heads + self.channels**2 + self.channels)

    def bytes_of_system(self, *, kept: int | None = None) -> int:
        """Float64 sums of CORP's per-image system of one site, for all dims or for `kept` dims per head."""
        width = self.dim if kept is None else kept
        restricted = 0 if kept is None else width**2 + 1
        return FLOAT64_BYTES * self.heads * ((width * (width + 1) // 2) ** 2 + restricted)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchShape(_NoSystem):
    """`tokens` are the places that a convolution gives; `channels` of each group, `chosen` of them (None: all) in
    patches of `taps` places; `outputs` of all groups."""

    tokens: int
    groups: int
    channels: int
    chosen: int | None
    taps: int
    outputs: int

    @classmethod
    def of(cls, site: PatchTaps, observed: ObservedShapes) -> Self:
        *_, outputs, rows, columns = observed("y")
        chosen = None if site.channels_GR is None else site.chosen
        return cls(
            tokens=rows * columns, groups=site.output.groups, channels=site.group_width, chosen=chosen,
            taps=site.places, outputs=outputs,
        )  # fmt: skip

    @property
    def summed(self) -> int:
        """Channels of a group in patches."""
        return self.channels if self.chosen is None else self.chosen

    def bytes_of_moments(self) -> int:
        """Float64 sums of one site."""
        columns = self.summed * self.taps
        numbers = self.groups * (columns**2 + columns + self.channels**2 + 2 * self.channels) + 2 * self.outputs
        cross = 0 if self.chosen is None else self.outputs * columns
        return FLOAT64_BYTES * (numbers + cross)


Shape = ChannelShape | HeadShape | PatchShape
_SHAPES: Mapping[SiteKind, Callable[[Any, ObservedShapes], Shape]] = {
    "mlp": ChannelShape.of,
    "attention": HeadShape.of,
    "convolution": PatchShape.of,
}


def shapes_of_sites(
    model: nn.Module, sites: Sequence[Site], *, example: Inputs, device: torch.device | str
) -> dict[str, Shape]:
    """Runs example inputs through `model`, which is on `device` (`meta` costs nothing), to learn what sites are fed."""
    observed: dict[tuple[str, Role], torch.Size] = {}

    def on_activation(name: str, role: Role, activation: Tensor) -> None:
        observed[name, role] = activation.shape

    with torch.no_grad(), evaluating(model), listening(sites, on_activation):
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
    """Bytes each site's sums take during and after a calibration with these options; `kept`: dims kept per head."""
    kept = kept or {}
    return {
        name: shape.bytes_of_moments()
        + (shape.bytes_of_system(kept=kept.get(name)) if attention_system or name in kept else 0)
        for name, shape in shapes.items()
    }


def patch_channels_that_fit(shapes: Mapping[str, Shape], available: int) -> Mapping[str, int]:
    """How many channels a group convolutions may keep in patches, so that all sums take `available` bytes at most.

    As few sites as possible are named, those with the largest sums, and of these the larger ones give up channels
    first; none keeps fewer than LEAST_CHANNELS. Empty where everything fits. Raises BadInput where even that doesn't.
    """
    total = sum(bytes_needed(shapes).values())
    named = _to_restrict(shapes, total - available)
    while total > available:
        name = max(named, key=lambda each: (named[each].summed > LEAST_CHANNELS, named[each].bytes_of_moments()))
        fewer = replace(named[name], chosen=named[name].summed - 1)
        total += fewer.bytes_of_moments() - named[name].bytes_of_moments()
        named[name] = fewer
    return {name: shape.chosen for name, shape in named.items() if shape.chosen is not None}


def _to_restrict(shapes: Mapping[str, Shape], excess: int) -> dict[str, PatchShape]:
    """The largest convolutions, as few as save that many bytes with patches of the fewest channels."""
    wide = {name: shape for name, shape in shapes.items() if isinstance(shape, PatchShape)}
    least = {name: replace(shape, chosen=LEAST_CHANNELS) for name, shape in wide.items()}
    saved = {name: wide[name].bytes_of_moments() - least[name].bytes_of_moments() for name in wide}
    order = sorted((name for name in wide if saved[name] > 0), key=lambda name: -wide[name].bytes_of_moments())
    count = next(
        (count for count in range(len(order) + 1) if sum(saved[name] for name in order[:count]) >= excess), None
    )
    if count is None:
        short = (excess - sum(saved[name] for name in order)) / 1e9
        raise BadInput(
            f"moments: {len(shapes)} sites need {short:.2f} GB more than are available, with patches of "
            f"{LEAST_CHANNELS} channels a group; calibrate fewer sites at a time, or use a larger machine"
        )
    return {name: wide[name] for name in order[:count]}


def bytes_available(device: torch.device | str) -> int:
    """Free memory of the GPU, or what this machine and the control group of the process leave."""
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
    """Raises BadInput when the sums won't fit, with the figures and the ways out."""
    total = sum(needed.values())
    if total > available:
        largest = max(needed, key=lambda name: needed[name])
        raise BadInput(
            f"moments: {len(needed)} sites need {total / 1e9:.2f} GB, {available / 1e9:.2f} GB are available; the "
            f"largest is {largest} with {needed[largest] / 1e9:.2f} GB; (a) leave out the attention system, or "
            "collect it for kept dims only, (b) calibrate fewer sites at a time, (c) use a larger machine"
        )
