"""The environment of a GPU run: the machine, the GPU as torch describes it, and its state between rows."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from perf.record.runs import Flat, Scalar
from perf.timing.watch import Watch, package_version
from perf.timing.watch import environment as machine

# All rows of one record have the same values of these.
MUST_MATCH = ("machine", "cpu", "gpu", "sm", "driver", "torch", "timm")


def environment(device: str, gpu: Flat | None) -> dict[str, Scalar]:
    """Return the facts of the environment, but no host or path; `gpu` has those of NVML, None without it."""
    described = {**machine(gpu), "timm": package_version("timm"), "triton": package_version("triton"), "device": device}
    if device == "cpu":
        return described | {"gpu": None, "sm": None, "torch_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return described | {
        "gpu": properties.name,
        "sm": f"{properties.major}.{properties.minor}",
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch_threads": torch.get_num_threads(),
        "flash_sdp": torch.backends.cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
    }


def state_of(watch: Watch) -> Callable[[], dict[str, Any] | None]:
    """Return a function that reads clocks, temperature, power and throttling, or returns None without NVML."""

    def read() -> dict[str, Any] | None:
        found = watch().gpu
        return None if found is None else asdict(found)

    return read
