"""Calibration on 4,000 images from memory beside a bare forward pass, and the reduction at 50 % that follows it.

Images are kept as bytes in host memory (page-locked on a GPU); both passes copy, widen and shift them alike. The 4,000
images are calibrated on in eight parts; after some of them (all for the smaller models) the bare forward runs over the
same part in the same precision, and the ratio is the median over those parts. Weights are random.

Share of the peak: the time that the multiplications of the forward pass and of the sums (symmetric ones counted half)
would take at the rates of a large matrix product measured here, in the precision of each, over the time taken.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import images as pictures
from benchmarks.gpu import models
from benchmarks.gpu.record import Record, Row, Task
from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from calib.collect import Collector, Precision
from calib.moments import Moments
from corp_deploy import vit
from perf.memory import Gauge, TorchAllocator, resident_gauge

# The paper's times for 4,000 images (CORP, calibration and recovery) on an RTX 3090: other hardware, other code.
PAPER_SECONDS_RTX3090 = {"DeiT-B": 570, "DeiT-L": 1845, "DeiT-H": 4920}
PARTS = 8
SPARSITY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of it: the bare forward after every `bare_every`-th part; blocks that a CPU reduces before the time of
    all is extrapolated; seconds on an H200 with float32, bfloat16 and tf32 forward, and of a whole reduction there."""

    bare_every: int
    cpu_blocks: int
    seconds: dict[Precision, float]
    reduction_s: float


LOADS = {
    "DeiT-B": Load(
        bare_every=1, cpu_blocks=3, seconds={"float32": 9.0, "bfloat16": 5.0, "tf32": 5.0}, reduction_s=10.0
    ),
    "DeiT-L": Load(
        bare_every=2, cpu_blocks=2, seconds={"float32": 24.0, "bfloat16": 10.0, "tf32": 12.0}, reduction_s=25.0
    ),
    "DeiT-H": Load(
        bare_every=4, cpu_blocks=2, seconds={"float32": 65.0, "bfloat16": 32.0, "tf32": 35.0}, reduction_s=45.0
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


@contextmanager
def forward_in(precision: Precision, device: str) -> Iterator[None]:
    """What the collector's forward pass runs in."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def held_images(count: int, size: int, device: str) -> Tensor:
    return pictures.held_in_bytes("calibration", count, size=size, device=device)


def gauge_of(device: str) -> Gauge | None:
    return TorchAllocator() if device == "cuda" else resident_gauge()


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


def work_flops(model: nn.Module, device: str) -> tuple[int, int]:
    """Of one image: the forward pass, and the sums."""
    from benchmarks.calibration import multiply_adds_per_image
    from calib.memory import shapes_of_sites

    image_shape = vit.input_spec(model).shape
    seen = shapes_of_sites(model, vit.calibration_sites(model), image_shape=image_shape, device=device)
    return 2 * models.facts(model)["macs"], 2 * sum(map(multiply_adds_per_image, seen.values()))


def timed_s(device: str, held: Tensor, batch: int, work: Callable[[Tensor], object]) -> float:
    """Feed all images in batches."""
    begun_s = clock_s(device)
    for piece in held.split(batch):
        work(pictures.images_from_bytes(piece, device))
    return clock_s(device) - begun_s


def calibrated(name: str, precision: Precision, setting: Setting) -> Row:
    """The row of one model with one precision of the forward pass."""
    size, load, device = sizes(setting), LOADS[name], setting.device
    model = models.dense(name, setting)
    sites = list(vit.calibration_sites(model))
    held = held_images(size["images"], setting.image_size, device)

    def bare(images: Tensor) -> None:
        with forward_in(precision, device):
            model(images)

    with Collector(model, sites, device=device, precision=precision) as first:
        timed_s(device, held[: 2 * size["batch"]], size["batch"], first.add)
    timed_s(device, held[: 2 * size["batch"]], size["batch"], bare)
    del first
    gauge = gauge_of(device)
    if gauge is not None:
        gauge.reset_peak()
    collector = Collector(model, sites, device=device, precision=precision)
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
    ideal_s = (forward / peaks[precision] + sums / peaks["float32"]) / 1e12
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


def moments_on(moments: Moments, device: str) -> Moments:
    """The same sums on another device."""
    sites: dict[str, Any] = {}
    for name, site in moments.sites.items():
        values: dict[str, Any] = {each.name: getattr(site, each.name) for each in fields(site)}
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in values.items()}
        kind: Any = type(site)
        sites[name] = kind(**moved)
    return replace(moments, sites=sites)


def reduced(name: str, where: str, setting: Setting) -> Row:
    """The row of one model's reduction at 50 % by preset best: the whole model on a GPU, on a CPU its first blocks.

    Getting the sums onto the GPU is counted there. On a CPU the seconds of the blocks timed are scaled to all of them.
    """
    from corp_deploy.choices import choices_from_preset
    from corp_deploy.inputs import model_digest
    from corp_deploy.reduce import reduce, uniform_widths

    size, device = sizes(setting), setting.device
    model = models.dense(name, setting)
    depth = vit.depth(model)
    blocks = depth if where == "cuda" else min(LOADS[name].cpu_blocks, depth)
    chosen = {f"blocks.{index}" for index in range(blocks)}
    sites = [site for site in vit.calibration_sites(model) if site.name.rpartition(".")[0] in chosen]
    held = held_images(size["images"], setting.image_size, device)[: size["reduction_images"]]
    with Collector(model, sites, device=device, precision="bfloat16") as collector:
        timed_s(device, held, size["batch"], collector.add)
        moments = collector.moments({"model": model_digest(model)})
    del collector
    choices = choices_from_preset(
        "best",
        mlp_sparsity=SPARSITY,
        attention_sparsity=SPARSITY,
        align_hidden=setting.align_hidden,
        align_head=ALIGN_HEAD,
    )
    named = {site.name for site in sites}
    widths = {site: width for site, width in uniform_widths(model, choices).items() if site in named}
    model = model.to(where)
    finished_s: list[float] = []
    begun_s = clock_s(where)
    there = moments_on(moments, where) if where == "cuda" else moments
    reduction = reduce(model, there, choices, widths=widths, done=lambda _: finished_s.append(clock_s(where)))
    seconds, sites_s = clock_s(where) - begun_s, finished_s[-1] - begun_s
    return {
        "row": "reduction",
        "model": name,
        "where": where,
        "preset": "best",
        "sparsity": SPARSITY,
        "calibration_images": len(held),
        "blocks": depth,
        "blocks_timed": blocks,
        "seconds_timed": seconds,
        "seconds": seconds + sites_s * (depth / blocks - 1.0),
        "extrapolated": blocks < depth,
        **{f"reduced_{key}": value for key, value in models.facts(reduction.model).items() if blocks == depth},
    }


def tasks(setting: Setting, record: Record) -> list[Task]:
    """The largest model first, since the goal is about it; what the goal doesn't need last."""
    held = [name for name in ("DeiT-H", "DeiT-B", "DeiT-L") if name in setting.models and name in LOADS]

    def calibration(name: str, precision: Precision) -> Task:
        seconds = 0.5 if setting.small else LOADS[name].seconds[precision]
        return Task(
            key=f"calibrate {name} {precision}",
            estimate_s=seconds,
            run=lambda: calibrated(name, precision, setting),
        )

    def reduction(name: str, where: str) -> Task:
        seconds = 0.5 if setting.small else LOADS[name].reduction_s
        return Task(key=f"reduce {name} {where}", estimate_s=seconds, run=lambda: reduced(name, where, setting))

    made = [calibration(name, "float32") for name in held[:1]]
    if setting.device == "cuda":
        made += [reduction(name, "cuda") for name in held[:1]]
    made += [calibration(name, "bfloat16") for name in held[:1]]
    made += [reduction(name, "cpu") for name in held[:1]]
    precisions: tuple[Precision, ...] = ("float32", "bfloat16", "tf32")
    made += [calibration(name, precision) for precision in precisions for name in held[1:]]
    made += [reduction(name, where) for name in held[1:] for where in dict.fromkeys((setting.device, "cpu"))]
    made += [calibration(name, "tf32") for name in held[:1]]
    return made
