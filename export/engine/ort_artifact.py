"""The artefact for ONNX Runtime: the graph as its optimizer leaves it, saved as ONNX, with the record of an engine."""

import importlib.metadata
import tempfile
import time
from pathlib import Path

import onnx

from export.graph.check import require_onnx
from export.graph.to_onnx import onnx_bytes
from export.graph.weights import weight_shares
from ground.errors import BadInput, Missing
from ground.onnx_file import read_onnx
from ground.precision import half_share, precision_of_shares

from .build import Engine, engine_of
from .fusion import Fusion, Kernel, attention_sites
from .session import missing_message

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_INSTALL = {"cpu": "pip install onnxruntime", "cuda": "pip install onnxruntime-gpu"}


def build_ort_artifact(
    onnx_path: Path, *, device: str = "cpu", precision: str | None = None, command: str = ""
) -> Engine:
    """Optimises the graph for `device` cpu or cuda, at the level that is valid on every machine (extended).

    `Engine.plan` holds the optimised ONNX; its record counts graph nodes where an engine's counts kernels. Raises
    Missing when ONNX Runtime or its CUDA provider is not there, BadInput for a graph that won't do: the CPU kernels
    compute half graphs in float32, so those are refused for cpu.
    """
    if device not in _PROVIDERS:
        raise BadInput(f"ONNX Runtime device {device!r} is unknown; choose one of {', '.join(_PROVIDERS)}")
    proto = require_onnx(onnx_path, precision=precision, backend="onnxruntime")
    shares = weight_shares(proto)
    if device == "cpu" and half_share(shares):
        raise BadInput(
            f"{onnx_path}: ONNX Runtime's CPU kernels compute in float32 and this graph is "
            f"{precision_of_shares(shares)}; "
            "build the fp32 graph, or for cuda"
        )
    started = time.perf_counter()
    optimised = _optimised(onnx_path, device, command)
    seconds = time.perf_counter() - started
    kernels = tuple(
        Kernel(name=node.name, kind=node.op_type, tactic="", types=None, nodes=(node.name,))
        for node in optimised.graph.node
    )
    return engine_of(
        onnx_path,
        proto,
        onnx_bytes(optimised),
        Fusion(kernels=kernels, attention_sites=attention_sites(proto)),
        weights=optimised,
        half_kernel_share=None,
        backend="onnxruntime",
        library_version=importlib.metadata.version("onnxruntime" if device == "cpu" else "onnxruntime-gpu"),
        command=command,
        targets=(device,),
        gpu=None,
        profiles=(),
        build_seconds=seconds,
        options={"optimization": "extended"},
    )


def _optimised(onnx_path: Path, device: str, command: str) -> onnx.ModelProto:
    try:
        import onnxruntime as ort
    except ImportError as error:
        reason = f"its Python package can't be loaded ({error})"
        raise Missing(missing_message("onnxruntime", reason, command, _INSTALL[device])) from error
    provider = _PROVIDERS[device]
    if provider not in ort.get_available_providers():
        reason = f"{provider} is not among {', '.join(ort.get_available_providers())}"
        raise Missing(missing_message("onnxruntime", reason, command, _INSTALL[device]))
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimised.onnx"
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(saved)
        options.log_severity_level = 3
        session = ort.InferenceSession(str(onnx_path), options, providers=[provider])
        if session.get_providers()[0] != provider:  # the provider is installed, but finds no GPU or library
            reason = f"{provider} could not start here; the session fell back to {session.get_providers()[0]}"
            raise Missing(missing_message("onnxruntime", reason, command, "the NVIDIA driver, CUDA and cuDNN"))
        return read_onnx(saved)
