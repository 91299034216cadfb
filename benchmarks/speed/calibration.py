"""What calibration costs beside a bare forward pass over the same images, and the memory it takes.

    python -m benchmarks.speed.calibration --threads 2 --attention-system --output
    benchmarks/results/calibration_small.json

Random weights and random images: only time and memory are measured. A run is a whole calibration of --batches batches,
from opening the collector to its moments. All runs take turns in one process, round after round, so that what else the
machine does falls on all of them; the ratio is the median over rounds of each round's own ratio to the faster of two
bare passes: whole batches, and a few images at a time. Memory is measured in a process of its own. On a GPU time is by
the host's clock once it has nothing left to do, and the share of peak FLOP/s uses --peak-tflops, the figure of that GPU
for float32 without tensor cores.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from benchmarks.speed.passes import BARE, PIECE, Samples, in_passes
from calib import products
from calib.axes import triangle
from calib.collect import Collector, Options, collect
from calib.memory import Shape, bytes_needed, shapes_of_sites
from calib.moments import ChannelMoments, HeadMoments
from calib.sites import ChannelTaps, Site
from corp_deploy.families.family import example_of, input_ports, listened, sites_of
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.traced.models.sites import calibration_taps
from perf.timing.watch import cpu_name

VERSION = 2


def clock_s(device: str) -> float:
    """Host time once the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bare(model: nn.Module, images: Tensor, batches: int, piece: int) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            for _ in range(batches):
                for part in images.split(piece):
                    model(part)

    return run


def calibration(
    heard: nn.Module, sites: list[Site], images: Tensor, batches: int, options: dict[str, Any]
) -> Callable[[], None]:
    """A calibration as `calibrate` makes it: a collector opened, its kernel chosen, all batches, the moments."""

    def run() -> None:
        products.kernel_of_this_cpu.cache_clear()
        collect(heard, sites, repeat(images, batches), device=images.device, options=Options(**options))

    return run


def timed(runs: dict[str, Callable[[], None]], rounds: int, device: str) -> Samples:
    """Wall and CPU seconds of every run in every round; even rounds go backwards through the runs."""
    samples: Samples = {name: {"wall_s": [], "cpu_s": []} for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: 1 if index % 2 else -1]:
            begun_s, cpu_s = clock_s(device), time.process_time()
            runs[name]()
            samples[name]["wall_s"].append(clock_s(device) - begun_s)
            samples[name]["cpu_s"].append(time.process_time() - cpu_s)
    return samples


def multiply_adds_per_image(shape: Shape) -> int:
    """Of the statistics, symmetric products counted as half."""
    sizes = shape.sizes
    if shape.moments is ChannelMoments:
        return shape.tokens * triangle(sizes["F"])
    assert shape.moments is HeadMoments, shape
    return shape.tokens * (2 * sizes["H"] * sizes["D"] ** 2 + triangle(sizes["C"]))


def peak_memory(arguments: argparse.Namespace) -> dict[str, float]:
    """MB of resident memory: the model once it has seen one image, the peak of its calibration, and the bound: model,
    moments and two batches of the widest activation."""
    model, sites, images = prepared(arguments)
    seen = shapes(model, sites, arguments)
    model_mb = resident_mb()
    widest = max(shape.tokens * shape.sizes["F"] for shape in seen.values() if shape.moments is ChannelMoments)
    bound = sum(bytes_needed(seen).values()) + 2 * 4 * arguments.batch_size * widest
    with Collector(listened(model), sites, device="cpu") as collector:
        for _ in range(3):
            collector.add(images)
    return {"model_mb": model_mb, "peak_mb": peak_mb(), "bound_mb": model_mb + bound / 1e6}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def peak_mb() -> float:
    """VmHWM: unlike ru_maxrss it does not start from the process that launched this one."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024 / 1e6


def prepared(arguments: argparse.Namespace) -> tuple[nn.Module, list[Site], Tensor]:
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = dense_from_architecture(Architecture(name=arguments.model)).to(arguments.device)
    images = torch.randn(arguments.batch_size, *input_ports(model)[0].shape).to(arguments.device)
    return model, list(calibration_taps(model, sites_of(model))), images


def shapes(model: nn.Module, sites: list[Site], arguments: argparse.Namespace) -> dict[str, Shape]:
    return shapes_of_sites(listened(model), sites, example=example_of(model), device=arguments.device)


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    model, sites, images = prepared(arguments)
    options, batches = {"precision": arguments.precision}, arguments.batches
    runs = {
        name: bare(model, images, batches, piece)
        for name, piece in zip(BARE, (arguments.batch_size, PIECE), strict=True)
    }
    heard = listened(model)
    runs["calibrate"] = calibration(heard, sites, images, batches, options)
    if arguments.attention_system:
        runs["calibrate_with_system"] = calibration(heard, sites, images, batches, options | {"attention_system": True})
    for run in runs.values():
        run()
    samples = timed(runs, arguments.rounds, arguments.device)
    seen = shapes(model, sites, arguments)
    flops = 2 * batches * arguments.batch_size * sum(map(multiply_adds_per_image, seen.values()))
    least_s = min(statistics.median(samples[name]["wall_s"]) for name in BARE)
    extra_s = statistics.median(samples["calibrate"]["wall_s"]) - least_s
    gpu = arguments.device == "cuda"
    return {
        "samples": samples,
        "ratio_wall": in_passes(samples, "wall_s"),
        "ratio_cpu": None if gpu else in_passes(samples, "cpu_s"),
        "kernel": None if gpu else products.kernel_for(max(site.output.in_features for site in mlps(sites))),
        "statistics_gflops": flops / extra_s / 1e9,
        "share_of_peak": flops / extra_s / 1e12 / arguments.peak_tflops if gpu and arguments.peak_tflops else None,
    }


def mlps(sites: list[Site]) -> list[ChannelTaps]:
    return [site for site in sites if isinstance(site, ChannelTaps)]


def environment(device: str) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    parser.add_argument("--attention-system", action="store_true")
    parser.add_argument("--peak-tflops", type=float, default=0.0)
    parser.add_argument("--memory-only", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    if arguments.memory_only:
        sys.stdout.write(json.dumps(peak_memory(arguments)))
        return
    before = environment(arguments.device)
    record: dict[str, Any] = {"kind": "benchmark.calibration", "version": VERSION, "environment": before}
    options = {name: str(value) for name, value in vars(arguments).items() if name != "output"}
    record |= {"options": options, "speed": speed(arguments)}
    if arguments.device == "cpu":
        command = [sys.executable, "-m", "benchmarks.speed.calibration", *sys.argv[1:], "--memory-only"]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        record["memory"] = json.loads(finished.stdout)
    text = json.dumps(record, indent=1)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")
    shown = {"ratio_wall": record["speed"]["ratio_wall"], "ratio_cpu": record["speed"]["ratio_cpu"]}
    sys.stdout.write(json.dumps(shown | {"memory": record.get("memory")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
