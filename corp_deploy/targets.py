"""Where a release's model is to run: what each target needs of this machine, and how its runners are opened."""

import ctypes
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .recipe import Target

if TYPE_CHECKING:
    from perf.bench import Subject
    from perf.runners import Runner

LIBRARY = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
NO_GPU = "this machine has no NVIDIA GPU with a driver"


def graph_name(precision: str) -> str:
    """model.onnx for fp32, model.fp16.onnx for fp16."""
    return "model.onnx" if precision == "fp32" else f"model.{precision}.onnx"


def plan_name(target: Target, subject: str) -> str:
    """Where a target's engine stands in a release: beside the graph it was built from, where `package` looks for it."""
    return f"{subject}/model.{target.name}.plan"


def artefact_name(target: Target, subject: str) -> str:
    """What the target runs: a plan, or the graph itself in ONNX Runtime."""
    return plan_name(target, subject) if target.is_engine else f"{subject}/{graph_name(target.precision)}"


def gpu_lack() -> str | None:
    """Why there is no GPU here, asked of the driver alone, which is quicker than asking torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_GPU
    return None if driver.cuInit(0) == 0 else NO_GPU


def _library_lack(target: Target) -> str | None:
    name = LIBRARY[target.name]
    return None if importlib.util.find_spec(name) else f"{target.name} is not installed here"


def build_lack(target: Target) -> str | None:
    """Why this machine can't build the target's engines; TensorRT-RTX needs no GPU for it."""
    return _library_lack(target) or (None if target.name == "tensorrt-rtx" else gpu_lack())


def run_lack(target: Target) -> str | None:
    """Why this machine can't run the target."""
    if target.is_engine:
        return _library_lack(target) or gpu_lack()
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed here; pip install 'corp-deploy[cpu]'"
    if target.name == "onnxruntime-cpu":
        return None
    import onnxruntime

    found = onnxruntime.get_available_providers()
    return None if "CUDAExecutionProvider" in found else "onnxruntime here has no CUDA provider (onnxruntime-gpu has)"


def opener(target: Target, path: Path, threads: int | None) -> "Callable[[], Runner]":
    """A function that makes the target's runner of this artefact, not yet entered."""
    from perf.engine_runner import EngineRunner
    from perf.onnx_runner import OnnxRunner

    if target.name == "tensorrt":
        return partial(EngineRunner, path, backend="tensorrt", precision=target.precision)
    if target.name == "tensorrt-rtx":
        return partial(EngineRunner, path, backend="tensorrt_rtx", precision=target.precision)
    if target.name == "onnxruntime-cuda":
        return partial(OnnxRunner, path, provider="cuda")
    return partial(OnnxRunner, path, threads=threads)


def subject_of(target: Target, root: Path, name: str, threads: int | None) -> "Subject":
    """The dense or the reduced model of a release as perf measures it."""
    from export.record import record_from_json, record_path
    from perf.bench import Subject

    from .files import sha256_of_file
    from .graphs import facts_of_onnx

    graph, path = root / name / graph_name(target.precision), root / artefact_name(target, name)
    facts, fused = facts_of_onnx(graph), None
    if target.is_engine:
        fused = record_from_json(record_path(path).read_text(encoding="utf-8")).fused_attention
    return Subject(
        name=name,
        open=opener(target, path, threads),
        macs=facts.macs,
        params=facts.parameters,
        size_bytes=path.stat().st_size,
        sha256=sha256_of_file(path),
        fused_attention=fused,
    )
