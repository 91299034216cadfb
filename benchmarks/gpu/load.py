"""How much calibration is measured, the images it is measured on, and how time is taken."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.gpu import images as pictures
from benchmarks.gpu.setting import Setting
from calib.collect import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of it: the bare forward after every `bare_every`-th part; blocks that a CPU reduces before the time of
    all is extrapolated; guesses in seconds by precision of the forward pass, and of the reductions by where.
    """

    bare_every: int
    cpu_blocks: int
    seconds: dict[Precision, float]
    reduction_s: dict[str, float]


LOADS = {
    "DeiT-B": Load(
        bare_every=1,
        cpu_blocks=3,
        seconds={"float32": 14.0, "bfloat16": 8.0, "tf32": 8.0},
        reduction_s={"cuda": 10.0, "cpu": 7.0},
    ),
    "DeiT-L": Load(
        bare_every=2,
        cpu_blocks=2,
        seconds={"float32": 36.0, "bfloat16": 14.0, "tf32": 18.0},
        reduction_s={"cuda": 22.0, "cpu": 10.0},
    ),
    "DeiT-H": Load(
        bare_every=4,
        cpu_blocks=2,
        seconds={"float32": 65.0, "bfloat16": 28.0, "tf32": 35.0},
        reduction_s={"cuda": 55.0, "cpu": 18.0},
    ),
}


def sizes(setting: Setting) -> dict[str, int]:
    """Images, images of a batch, images the reductions are calibrated on, and the side of the timed product."""
    if setting.small:
        return {"images": 32, "batch": 4, "reduction_images": 8, "product": 128}
    return {"images": 4000, "batch": 50, "reduction_images": 512, "product": 8192}


def clock_s(device: str) -> float:
    """Host time once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def held_images(count: int, size: int, device: str) -> Tensor:
    return pictures.held_in_bytes("calibration", count, size=size, device=device)


def timed_s(device: str, held: Tensor, batch: int, work: Callable[[Tensor], object]) -> float:
    """Feed all images in batches."""
    begun_s = clock_s(device)
    for piece in held.split(batch):
        work(pictures.images_from_bytes(piece, device))
    return clock_s(device) - begun_s
