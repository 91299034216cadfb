"""Calibration on 4,000 images from memory beside a bare forward pass, and the reduction that follows it.

Images are bytes in host memory (page-locked on a GPU); both passes copy and widen them alike. They are calibrated on in
eight parts; after some of them (all for the smaller models) the bare forward runs over the same part in the same
precision, and the ratio is the median over those parts. Weights and images are random.

Share of the peak: the time that the multiplications of the forward pass and of the sums (symmetric ones counted half)
would take at the rates of a large matrix product measured here, in the precision of each, over the time taken.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn

from benchmarks.gpu import models
from benchmarks.gpu.record import Record, Row, Task
from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from calib.collect import Collector, Options, Precision
from calib.products import matmul_precision
from corp_deploy.families.family import example_of, listened, sites_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.inputs import lineage_of_model
from corp_deploy.traced.models.sites import calibration_taps
from perf.runners.protocol import Gauge, resident_gauge, torch_allocator

# The paper's times for 4,000 images (CORP, calibration and recovery) on an RTX 3090: other hardware, other code.
PAPER_SECONDS_RTX3090 = {"DeiT-B": 570, "DeiT-L": 1845, "DeiT-H": 4920}
PARTS, SPARSITY = 8, 0.5
BARE_EVERY = {"DeiT-B": 1, "DeiT-L": 2, "DeiT-H": 4}
# What the sums' products run in, by the forward pass's precision: see calib/products.py.
OF_SUMS: dict[Precision, Precision] = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16"}
# Guesses in seconds of a calibration by precision of the forward pass, and of a reduction.
SECONDS: dict[str, dict[Precision, float]] = {
    "DeiT-B": {"float32": 14.0, "bfloat16": 8.0, "tf32": 8.0},
    "DeiT-L": {"float32": 36.0, "bfloat16": 14.0, "tf32": 18.0},
    "DeiT-H": {"float32": 65.0, "bfloat16": 28.0, "tf32": 35.0},
}
REDUCTION_S = {"DeiT-B": 10.0, "DeiT-L": 22.0, "DeiT-H": 55.0}


def sizes(setting: Setting) -> dict[str, int]:
    """Return images, images of a batch, images the reduction is calibrated on, and the side of the timed product."""
    if setting.small:
        return {"images": 32, "batch": 4, "reduction_images": 8, "product": 128}
    return {"images": 4000, "batch": 50, "reduction_images": 512, "product": 8192}


def clock_s(device: str) -> float:
    """Return the host's time once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def held_images(count: int, size: int, device: str) -> Tensor:
    """Return random bytes [N,3,size,size] in host memory, page-locked where there is a GPU."""
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return pixels.pin_memory() if device == "cuda" else pixels


def timed_s(device: str, held: Tensor, batch: int, work: Callable[[Tensor], object]) -> float:
    """Feed all images in batches and return the seconds."""
    begun_s = clock_s(device)
    for piece in held.split(batch):
        work(piece.to(device, non_blocking=True).float().sub_(128.0).div_(64.0))
    return clock_s(device) - begun_s


@contextmanager
def forward_in(precision: Precision, device: str) -> Iterator[None]:
    """Run forward passes as the collector does."""
    products = matmul_precision("high" if precision == "tf32" else "highest")
    with products, torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        yield


def gauge_of(device: str) -> Gauge | None:
    return torch_allocator() if device == "cuda" else resident_gauge()


@cache
def product_tflops(precision: Precision, side: int, device: str) -> float:
    """Return the rate of a square matrix product of random values, the median of ten after three."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    taken_s = []
    with forward_in(precision, device), torch.autocast(device, enabled=False):
        for _ in range(13):
            begun_s = clock_s(device)
            torch.mm(a, b)
            taken_s.append(clock_s(device) - begun_s)
    return 2 * side**3 / statistics.median(taken_s[3:]) / 1e12


def work_flops(model: nn.Module, device: str) -> tuple[int, int]:
    """Return the operations of one image: the forward pass, and the sums."""
    from benchmarks.speed.calibration import multiply_adds_per_image
    from calib.memory import shapes_of_sites

    taps = calibration_taps(model, sites_of(model))
    seen = shapes_of_sites(listened(model), taps, example=example_of(model), device=device)
    return 2 * models.facts(model)["macs"], 2 * sum(map(multiply_adds_per_image, seen.values()))


def calibrated(name: str, precision: Precision, setting: Setting) -> Row:
    """Calibrate one model with one precision of the forward pass."""
    size, device = sizes(setting), setting.device
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
        if index % BARE_EVERY[name] == 0:
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


def reduced(name: str, setting: Setting) -> Row:
    """Reduce one model at 50 % by preset best on the device; the sums are put there site by site, which is counted."""
    size, device = sizes(setting), setting.device
    model = models.dense(name, setting)
    held = held_images(size["images"], setting.image_size, device)[: size["reduction_images"]]
    taps, options = calibration_taps(model, sites_of(model)), Options(precision="bfloat16")
    with Collector(listened(model), taps, device=device, options=options) as collector:
        timed_s(device, held, size["batch"], collector.add)
        moments = collector.moments(lineage_of_model(model))
    widths = {"mlp_sparsity": SPARSITY, "attention_sparsity": SPARSITY}
    method = method_from_preset("best", **widths, align_hidden=setting.align_hidden, align_head=ALIGN_HEAD)
    begun_s = clock_s(device)
    reduction = reduce(model, moments, method)
    seconds = clock_s(device) - begun_s
    told = {"row": "reduction", "model": name, "where": device, "preset": "best", "sparsity": SPARSITY}
    told |= {"calibration_images": len(held), "seconds": seconds, "extrapolated": False}
    return told | {f"reduced_{key}": value for key, value in models.facts(reduction.model).items()}


def tasks(setting: Setting, record: Record) -> list[Task]:
    """The largest model first, as the goal is about it; with `everything` tf32 and the smaller models' reductions."""
    held = [name for name in ("DeiT-H", "DeiT-B", "DeiT-L") if name in setting.models]
    largest, smaller = held[0], held[1:]

    def calibration(name: str, precision: Precision) -> Task:
        seconds = 0.5 if setting.small else SECONDS[name][precision]
        run = partial(calibrated, name, precision, setting)
        return Task(key=f"calibrate {name} {precision}", estimate_s=seconds, run=run)

    def reduction(name: str) -> Task:
        seconds = 0.5 if setting.small else REDUCTION_S[name]
        return Task(key=f"reduce {name} {setting.device}", estimate_s=seconds, run=partial(reduced, name, setting))

    made = [calibration(largest, "bfloat16"), reduction(largest), calibration(largest, "float32")]
    precisions: tuple[Precision, ...] = ("bfloat16", "float32")
    made += [calibration(name, precision) for precision in precisions for name in smaller]
    if setting.everything:
        made += [calibration(name, "tf32") for name in held]
        made += [reduction(name) for name in smaller]
    return made
