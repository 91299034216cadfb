"""The artefact for ONNX Runtime: the graph as its optimizer leaves it, saved as ONNX, with the record of an engine."""

import importlib.metadata
import tempfile
import time
from pathlib import Path

import onnx

from export.graph.check import require_onnx
from export.graph.ports import ports_of_graph, roles_of_graph
from export.graph.to_onnx import onnx_bytes
from export.graph.weights import weight_shares
from ground.errors import BadInput, Missing
from ground.onnx_file import read_onnx
from ground.precision import half_share, precision_of_shares

from .build import Engine
from .fusion import Fusion, Kernel, attention_sites
from .record import EngineRecord, sha256_of
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
    return _engine(onnx_path, proto, optimised, device=device, command=command, seconds=seconds)


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


def _engine(
    onnx_path: Path, proto: onnx.ModelProto, optimised: onnx.ModelProto, *, device: str, command: str, seconds: float
) -> Engine:
    content, plan = onnx_path.read_bytes(), onnx_bytes(optimised)
    shares = weight_shares(optimised)
    kernels = tuple(
        Kernel(name=node.name, kind=node.op_type, tactic="", types=None, nodes=(node.name,))
        for node in optimised.graph.node
    )
    fusion = Fusion(kernels=kernels, attention_sites=attention_sites(proto))
    inputs, outputs = ports_of_graph(proto)
    record = EngineRecord(
        backend="onnxruntime",
        library_version=importlib.metadata.version("onnxruntime" if device == "cpu" else "onnxruntime-gpu"),
        command=command,
        onnx_sha256=sha256_of(content),
        onnx_bytes=len(content),
        plan_sha256=sha256_of(plan),
        plan_bytes=len(plan),
        precision=precision_of_shares(shares),
        half_weight_share=half_share(shares),
        half_kernel_share=None,
        targets=(device,),
        gpu=None,
        profiles=(),
        inputs=inputs,
        outputs=outputs,
        kernels=len(kernels),
        kernel_kinds=fusion.kinds,
        attention_sites=fusion.attention_sites,
        fused_attention_sites=fusion.fused_sites,
        build_seconds=seconds,
        options={"optimization": "extended"},
        roles=roles_of_graph(proto),
        weight_types=shares,
    )
    return Engine(plan=plan, fusion=fusion, record=record)
