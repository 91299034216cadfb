"""What a calibration will hold, computed before it runs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .hooks import evaluating, listening
from .inputs import Inputs, moved, run_model
from .sites import ChannelTaps, Role, Site

FLOAT64_BYTES = 8
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelShape:
    tokens: int
    hidden: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """`dim` is that of q and k, `channels` that of z."""

    tokens: int
    heads: int
    dim: int
    channels: int


Shape = ChannelShape | HeadShape


def shapes_of_sites(
    model: nn.Module, sites: Sequence[Site], *, example: Inputs, device: torch.device | str
) -> dict[str, Shape]:
    """Runs example inputs through `model`, which is on `device` (`meta` costs nothing), to learn what sites are fed."""
    seen: dict[tuple[str, Role], torch.Size] = {}

    def hear(name: str, role: Role, activation: Tensor) -> None:
        seen[name, role] = activation.shape

    with torch.no_grad(), evaluating(model), listening(sites, hear):
        run_model(model, moved(example, device))
    return {site.name: _shape_of(site, seen) for site in sites}


def _shape_of(site: Site, seen: Mapping[tuple[str, Role], torch.Size]) -> Shape:
    try:
        if isinstance(site, ChannelTaps):
            _, tokens, hidden = seen[site.name, "x"]
            return ChannelShape(tokens=tokens, hidden=hidden)
        _, heads, tokens, dim = seen[site.name, "q"]
        return HeadShape(tokens=tokens, heads=heads, dim=dim, channels=seen[site.name, "z"][-1])
    except KeyError as error:
        raise BadInput(f"{site.name}: its modules never ran in a forward pass of this model") from error


def bytes_of_moments(shape: Shape) -> int:
    """Float64 sums of one site, the attention system aside."""
    if isinstance(shape, ChannelShape):
        return FLOAT64_BYTES * (shape.hidden**2 + 2 * shape.hidden)
    heads = shape.heads * (3 * shape.dim**2 + 3 * shape.dim)
    return FLOAT64_BYTES * (heads + shape.channels**2 + shape.channels)


def bytes_of_system(shape: HeadShape, *, kept: int | None = None) -> int:
    """Float64 sums of CORP's per-image system of one site, for all dims or for `kept` dims per head."""
    width = shape.dim if kept is None else kept
    restricted = 0 if kept is None else width**2 + 1
    return FLOAT64_BYTES * shape.heads * ((width * (width + 1) // 2) ** 2 + restricted)


def bytes_needed(
    shapes: Mapping[str, Shape], *, attention_system: bool = False, kept: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Bytes each site's sums take during and after a calibration with these options; `kept`: dims kept per head."""
    kept = kept or {}
    needed = {name: bytes_of_moments(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if isinstance(shape, HeadShape) and (attention_system or name in kept):
            needed[name] += bytes_of_system(shape, kept=kept.get(name))
    return needed


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
            f"largest is {largest} with {needed[largest] / 1e9:.2f} GB; (a) leave out the attention system, or take it "
            "for kept dims only, (b) calibrate fewer sites at a time, (c) use a larger machine"
        )
