"""Where a release's model is to run: what each target needs of this machine, and how it is run there."""

import importlib.util
from typing import Any

from corp_deploy.invocation.table import BENCH
from ground.gpu import missing_gpu

from .recipe import Target

OPENVINO = "pip install 'corp-deploy[openvino]'"
LIBRARY = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def _missing_library(target: Target) -> str | None:
    name = LIBRARY[target.name]
    return None if importlib.util.find_spec(name) else f"{target.name} is not installed here"


def missing_to_build(target: Target) -> str | None:
    """Why this machine can't build the target's engines; TensorRT-RTX needs no GPU for it."""
    return _missing_library(target) or (None if target.name == "tensorrt-rtx" else missing_gpu())


def missing_to_run(target: Target) -> str | None:
    """Why this machine can't run the target."""
    if target.is_engine:
        return _missing_library(target) or missing_gpu()
    if target.name == "openvino":
        return None if importlib.util.find_spec("openvino") else f"openvino is not installed here; {OPENVINO}"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed here; pip install 'corp-deploy[cpu]'"
    if target.name == "onnxruntime-cpu":
        return None
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    return (
        None if "CUDAExecutionProvider" in providers else "onnxruntime here has no CUDA provider (onnxruntime-gpu has)"
    )


def run_options(target: Target, threads: int | None) -> dict[str, Any]:
    """How `bench` runs the target's artefacts: options of its table and their values."""
    options: dict[str, Any] = {
        "onnxruntime-cpu": {"provider": "cpu", "threads": threads},
        "onnxruntime-cuda": {"provider": "cuda", "threads": threads},
        "openvino": {"backend": "openvino", "dtype": target.precision, "threads": threads},
    }.get(target.name, {"mode": "cuda_graph", "threads": threads})
    return BENCH.supported(target.name, {name: value for name, value in options.items() if value is not None})
