"""Where a release's model is to run: what each target needs of this machine, and how it is told to run there."""

import importlib.util
from typing import Any

from corp_deploy.invocation.table import BENCH
from ground.gpu import missing_gpu

from .recipe import Target

LIBRARY = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def graph_name(precision: str) -> str:
    """model.onnx for fp32, model.fp16.onnx for fp16."""
    return "model.onnx" if precision == "fp32" else f"model.{precision}.onnx"


def plan_name(target: Target, subject: str) -> str:
    """Where a target's engine stands in a release: beside the graph it was built from, where `package` looks for it."""
    return f"{subject}/model.{target.name}.plan"


def artefact_name(target: Target, subject: str) -> str:
    """What the target runs: a plan, or the graph itself in ONNX Runtime."""
    return plan_name(target, subject) if target.is_engine else f"{subject}/{graph_name(target.precision)}"


def _library_lack(target: Target) -> str | None:
    name = LIBRARY[target.name]
    return None if importlib.util.find_spec(name) else f"{target.name} is not installed here"


def build_lack(target: Target) -> str | None:
    """Why this machine can't build the target's engines; TensorRT-RTX needs no GPU for it."""
    return _library_lack(target) or (None if target.name == "tensorrt-rtx" else missing_gpu())


def run_lack(target: Target) -> str | None:
    """Why this machine can't run the target."""
    if target.is_engine:
        return _library_lack(target) or missing_gpu()
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed here; pip install 'corp-deploy[cpu]'"
    if target.name == "onnxruntime-cpu":
        return None
    import onnxruntime

    found = onnxruntime.get_available_providers()
    return None if "CUDAExecutionProvider" in found else "onnxruntime here has no CUDA provider (onnxruntime-gpu has)"


def running_words(target: Target, threads: int | None) -> dict[str, Any]:
    """How `bench` is told to run the target's artefacts: options of its table and their values."""
    wanted = {
        "onnxruntime-cpu": {"provider": "cpu", "threads": threads},
        "onnxruntime-cuda": {"provider": "cuda", "threads": threads},
    }.get(target.name, {"mode": "cuda_graph", "threads": threads})
    given = {name: value for name, value in wanted.items() if value is not None}
    return BENCH.honoured(target.name, given)
