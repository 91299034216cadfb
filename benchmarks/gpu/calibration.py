"""Calibration on 4,000 images from memory beside a bare forward pass; the reduction that follows it is reduction.py's.

Images are kept as bytes in host memory (page-locked on a GPU); both passes copy, widen and shift them alike. The 4,000
images are calibrated on in eight parts; after some of them (all for the smaller models) the bare forward runs over the
same part in the same precision, and the ratio is the median over those parts. Weights are random.

Share of the peak: the time that the multiplications of the forward pass and of the sums (symmetric ones counted half)
would take at the rates of a large matrix product measured here, in the precision of each, over the time taken.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import models
from benchmarks.gpu.load import LOADS, clock_s, held_images, sizes, timed_s
from benchmarks.gpu.record import Record, Row, Task
from benchmarks.gpu.reduction import reduced
from benchmarks.gpu.setting import Setting
from calib.collect import Collector, Options, Precision
from calib.products import add_gram_, matmul_precision, mirror_
from corp_deploy.families.family import example_of, listened, sites_of
from corp_deploy.traced.models.sites import calibration_taps
from perf.runners.protocol import Gauge, resident_gauge, torch_allocator

# The paper's times for 4,000 images (CORP, calibration and recovery) on an RTX 3090: other hardware, other code.
PAPER_SECONDS_RTX3090 = {"DeiT-B": 570, "DeiT-L": 1845, "DeiT-H": 4920}
PARTS = 8
# What the sums' products run in, by the forward pass's precision: see calib/products.py.
OF_SUMS: dict[Precision, Precision] = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16"}


@contextmanager
def forward_in(precision: Precision, device: str) -> Iterator[None]:
    """What the collector's forward pass runs in."""
    products = matmul_precision("high" if precision == "tf32" else "highest")
    with products, torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        yield


def gauge_of(device: str) -> Gauge | None:
    return torch_allocator() if device == "cuda" else resident_gauge()


@cache
def product_tflops(precision: Precision, side: int, device: str) -> float:
    """Rate of a square matrix product of random values: the median of ten after three."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    taken_s = []
    with forward_in(precision, device), torch.autocast(device, enabled=False):
        for _ in range(13):
            begun_s = clock_s(device)
            torch.mm(a, b)
            taken_s.append(clock_s(device) - begun_s)
    return 2 * side**3 / statistics.median(taken_s[3:]) / 1e12


def gram_errors(setting: Setting) -> Row:
    """How far sums of products are from float64's, of the mean diagonal, for values of bfloat16 in either type: those
    with a mean of three deviations, whose terms have one sign, are the worst.
    """
    shape = (4, 65, 128) if setting.small else (50, 257, 5120)
    errors = {}
    for mean in (0.0, 3.0):
        x_BNF = torch.randn(shape, generator=torch.Generator().manual_seed(0)).add_(mean).bfloat16().to(setting.device)
        x_nF = x_BNF.flatten(0, 1).double()
        wanted_FF = x_nF.T @ x_nF
        for held in (x_BNF, x_BNF.float()):
            total_FF = torch.zeros_like(wanted_FF)
            add_gram_(total_FF, held)
            mirror_(total_FF)
            away = (total_FF - wanted_FF).abs().max() / wanted_FF.diagonal().mean()
            errors[f"{held.dtype}, mean {mean:g}".removeprefix("torch.")] = float(away)
    return {"row": "Gram", "shape": list(shape), "errors": errors}


def multiply_adds_per_image(shape: Any) -> int:
    """Return those of a site's statistics, symmetric products counted as half."""
    from calib.axes import triangle
    from calib.moments import ChannelMoments

    sizes = shape.sizes
    if shape.moments is ChannelMoments:
        return int(shape.tokens * triangle(sizes["F"]))
    return int(shape.tokens * (2 * sizes["H"] * sizes["D"] ** 2 + triangle(sizes["C"])))


def work_flops(model: nn.Module, device: str) -> tuple[int, int]:
    """Of one image: the forward pass, and the sums."""
    from calib.memory import shapes_of_sites

    taps = calibration_taps(model, sites_of(model))
    seen = shapes_of_sites(listened(model), taps, example=example_of(model), device=device)
    return 2 * models.facts(model)["macs"], 2 * sum(map(multiply_adds_per_image, seen.values()))


def calibrated(name: str, precision: Precision, setting: Setting) -> Row:
    """The row of one model with one precision of the forward pass."""
    size, load, device = sizes(setting), LOADS[name], setting.device
    model = models.dense(name, setting)
    heard, taps = listened(model), calibration_taps(model, sites_of(model))
    held = held_images(size["images"], setting.image_size, device)

    def bare(images: Tensor) -> None:
        with forward_in(precision, device):
            model(images)

    with Collector(heard, taps, device=device, options=Options(precision=precision)) as first:
        timed_s(device, held[: 2 * size["batch"]], size["batch"], first.add)
    timed_s(device, held[: 2 * size["batch"]], size["batch"], bare)
    del first
    gauge = gauge_of(device)
    if gauge is not None:
        gauge.reset_peak()
    collector = Collector(heard, taps, device=device, options=Options(precision=precision))
    parts_s: list[float] = []
    bare_s: dict[int, float] = {}
    for index, part in enumerate(held.split(size["images"] // PARTS)):
        with collector:
            parts_s.append(timed_s(device, part, size["batch"], collector.add))
        if index % load.bare_every == 0:
            bare_s[index] = timed_s(device, part, size["batch"], bare)
    begun_s = clock_s(device)
    collector.moments({})
    to_host_s = clock_s(device) - begun_s
    forward, sums = (flops * size["images"] for flops in work_flops(model, device))
    peaks = {each: product_tflops(each, size["product"], device) for each in (precision, "float32")}
    ideal_s = (forward / peaks[precision] + sums / peaks[OF_SUMS[precision]]) / 1e12
    return {
        "row": "calibration",
        "model": name,
        "forward": precision,
        "images": collector.images,
        "batch": size["batch"],
        "seconds": sum(parts_s) + to_host_s,
        "to_host_seconds": to_host_s,
        "part_seconds": parts_s,
        "bare_seconds": {str(index): seconds for index, seconds in bare_s.items()},
        "ratio_to_bare": statistics.median(parts_s[index] / seconds for index, seconds in bare_s.items()),
        "forward_flops": forward,
        "sums_flops": sums,
        "product_tflops": peaks,
        "share_of_peak": ideal_s / sum(parts_s),
        "peak_memory_bytes": None if gauge is None else gauge.peak(),
        "peak_memory_method": None if gauge is None else gauge.method,
        "paper_seconds_rtx3090": PAPER_SECONDS_RTX3090.get(name),
    }


def tasks(setting: Setting, record: Record) -> list[Task]:
    """The largest model first, as the goal is about it; with `everything` tf32 and the smaller models' reductions."""
    held = [name for name in ("DeiT-H", "DeiT-B", "DeiT-L") if name in setting.models]
    largest, smaller = held[0], held[1:]

    def calibration(name: str, precision: Precision) -> Task:
        seconds = 0.5 if setting.small else LOADS[name].seconds[precision]
        run = partial(calibrated, name, precision, setting)
        return Task(key=f"calibrate {name} {precision}", estimate_s=seconds, run=run)

    def reduction(name: str, where: str) -> Task:
        seconds = 0.5 if setting.small else LOADS[name].reduction_s[where]
        return Task(key=f"reduce {name} {where}", estimate_s=seconds, run=partial(reduced, name, where, setting))

    made = [Task(key="Gram", estimate_s=1.0, run=partial(gram_errors, setting)), calibration(largest, "bfloat16")]
    if setting.device == "cuda":
        made.append(reduction(largest, "cuda"))
    made.append(calibration(largest, "float32"))
    precisions: tuple[Precision, ...] = ("bfloat16", "float32")
    made += [calibration(name, precision) for precision in precisions for name in smaller]
    made.append(reduction(largest, "cpu"))
    if setting.everything or setting.small:
        made += [calibration(name, "tf32") for name in held]
        made += [reduction(name, where) for name in smaller for where in dict.fromkeys((setting.device, "cpu"))]
    return made
