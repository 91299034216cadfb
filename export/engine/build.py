"""Builds of engines from ONNX by TensorRT (10.16.1 and newer, 11), TensorRT-RTX and ONNX Runtime.

The graph's types decide the precision: networks are strongly typed, and no precision flag exists.
"""

import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx
from onnx import ModelProto

from export.graph.check import require_onnx
from export.graph.ports import graph_inputs, ports_of_graph, roles_of_graph
from export.graph.weights import declared_types, notes_of, sparse_matrices, weight_shares
from ground.built_engines import record_built_engine
from ground.errors import BadInput, Missing
from ground.files import replacing, write_json
from ground.onnx_file import read_onnx
from ground.precision import BFLOAT16, half_share, precision_of_shares

from .fusion import Kernel, attention_sites, fusion_fields
from .messages import Progress, sparse_layers_from_log
from .options import BatchProfile, BuildOptions
from .record import WITHOUT_MEMORY, EngineMemory, EngineRecord, record_path, sha256_of
from .session import Library, Session, missing_message, open_library

T = TypeVar("T")


def interruptible(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Return the result of `work`, run in its own thread, where signals interrupt no callback; Ctrl-C calls `stop`."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                stop()


FIRST_AMPERE_SM = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    plan: bytes
    record: EngineRecord

    def __post_init__(self) -> None:
        assert len(self.plan) > 0, "empty plan"


def build_engine(
    onnx_path: Path, choices: BuildOptions, *, library: Library | None = None, progress: Progress | None = None
) -> Engine:
    """Build one plan; `library` defaults to the backend's own bindings.

    `progress` is called as (phase, steps done, steps in all) from the thread that builds. Raises BadInput for a graph
    or option that the builder refuses, with all errors and their sites, and Missing without bindings or GPU. Ctrl-C
    stops the builder.
    """
    proto = require_onnx(onnx_path, precision=choices.precision, backend=choices.backend)
    _refuse_old_targets(proto, choices.sms, onnx_path)
    sparse_share = _sparse_share(proto, onnx_path) if choices.sparse else None
    profiles = _profiles_for_graph(proto, choices.profiles, onnx_path)
    library = library or open_library(choices.backend, command=choices.command)
    _refuse_old_gpu(choices)
    session = Session(onnx_path, proto, choices, library)
    started = time.perf_counter()
    plan = interruptible(lambda: session.build(profiles, progress), session.messages.stop)
    seconds = time.perf_counter() - started
    kernels, memory = session.inspected(plan, max(len(profiles), 1))
    gpu, own_target = (None, None) if library.is_rtx else _gpu()
    options = {
        "timing_cache": session.cache_state,
        "sparse": choices.sparse,
        "sparse_share": sparse_share,
        "version_compatible": choices.version_compatible,
        "compatibility": choices.compatibility,
        "optimization_level": choices.optimization_level,
        "workspace_bytes": choices.workspace_bytes,
    }
    return engine_from_plan(
        onnx_path,
        proto,
        plan,
        fusion_fields(kernels, attention_sites(proto) if kernels else (), max(len(profiles), 1)),
        weights=proto,
        backend=library.name,
        library_version=library.version,
        command=choices.command,
        targets=(choices.sms or ("portable",)) if library.is_rtx else (own_target or "unknown",),
        gpu=gpu,
        profiles=tuple(map(str, profiles)),
        build_seconds=seconds,
        options={name: value for name, value in options.items() if value is not None},
        **sparse_layers_from_log(session.messages.text),
        fusion_breaks=ports_of_graph(proto, breaks=True)[1],
        notes={key: value for key, value in notes_of(proto).items() if not key.startswith("export.")},
        memory=memory,
    )


def engine_from_plan(
    onnx_path: Path, proto: ModelProto, plan: bytes, fusion: Mapping[str, Any], *, weights: ModelProto, **own: Any
) -> Engine:
    """Return a plan with its record, from the graph, `fusion` fields, the types of `weights`, and `own` fields."""
    content, shares = onnx_path.read_bytes(), weight_shares(weights)
    inputs, outputs = ports_of_graph(proto)
    facts: dict[str, Any] = {
        "onnx_sha256": sha256_of(content),
        "onnx_bytes": len(content),
        "plan_sha256": sha256_of(plan),
        "plan_bytes": len(plan),
        "precision": precision_of_shares(shares),
        "half_weight_share": half_share(shares),
        "weight_types": shares,
        "inputs": inputs,
        "outputs": outputs,
        "roles": roles_of_graph(proto),
        **fusion,
    }
    return Engine(plan=plan, record=EngineRecord(**facts | own))


def write_engine(engine: Engine, plan_path: Path) -> None:
    """Write the plan, then `<plan>.json`, and register the plan as built on this machine."""
    with replacing(plan_path) as temporary:
        temporary.write_bytes(engine.plan)
    write_json(record_path(plan_path), engine.record.to_json())
    record_built_engine(engine.record.plan_sha256)


def _profiles_for_graph(
    proto: ModelProto, profiles: tuple[BatchProfile, ...], onnx_path: Path
) -> tuple[BatchProfile, ...]:
    """Return the profiles for a dynamic graph, none for a static one. Raises BadInput where they don't fit it."""
    batch = graph_inputs(proto)[0].type.tensor_type.shape.dim[0]  # the check made sure that all inputs share it
    if batch.dim_param:
        if not profiles:
            raise BadInput(f"{onnx_path}: the batch is dynamic; name at least one profile, such as --batch 1:8:64")
        return profiles
    fixed = BatchProfile(smallest=batch.dim_value, tuned=batch.dim_value, largest=batch.dim_value)
    if any(profile != fixed for profile in profiles):
        raise BadInput(
            f"{onnx_path}: the batch is fixed at {batch.dim_value}, asked for {', '.join(map(str, profiles))}; "
            "leave --batch out or export with a dynamic batch"
        )
    return ()


def _refuse_old_targets(proto: ModelProto, sms: tuple[str, ...], onnx_path: Path) -> None:
    old = [sm for sm in sms if sm.isdigit() and int(sm) < FIRST_AMPERE_SM]
    if old and BFLOAT16.onnx in declared_types(proto.graph).values():
        raise BadInput(
            f"{onnx_path}: holds bfloat16, which GPUs have from SM{FIRST_AMPERE_SM} on, and --sm asks for "
            f"{', '.join(old)}; leave {'it' if len(old) == 1 else 'those'} out, or export with --precision fp16"
        )


def _refuse_old_gpu(choices: BuildOptions) -> None:
    gpu, target = _gpu() if choices.compatibility == "ampere-plus" else (None, None)
    if target is not None and int(target) < FIRST_AMPERE_SM:
        raise BadInput(
            f"compatibility ampere-plus: needs a GPU of Ampere (SM{FIRST_AMPERE_SM}) or newer to build, this one is a "
            f"{gpu} (SM{target}); leave it out, or build on a newer GPU"
        )


def _sparse_share(proto: ModelProto, onnx_path: Path) -> float:
    sparse = sparse_matrices(proto)
    if not any(sparse.values()):
        raise BadInput(
            f"{onnx_path}: sparse kernels need matrices with two zeros in every four weights, and none of its "
            f"{len(sparse)} matrices has them; leave --sparse out"
        )
    return sum(sparse.values()) / len(sparse)


def _gpu() -> tuple[str | None, str | None]:
    import torch

    if not torch.cuda.is_available():
        return None, None
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), f"{major}{minor}"


_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_INSTALL = {"cpu": "pip install onnxruntime", "cuda": "pip install onnxruntime-gpu"}


def build_ort_artifact(
    onnx_path: Path, *, device: str = "cpu", precision: str | None = None, command: str = ""
) -> Engine:
    """Optimise the graph for `device` cpu or cuda, at the highest level that is valid on every machine (extended).

    The record counts graph nodes as kernels. Raises Missing without ONNX Runtime or its CUDA provider, and BadInput for
    a graph that can't be built, such as a 16-bit graph for the CPU, whose kernels compute in float32.
    """
    from export.graph.to_onnx import onnx_bytes  # torch comes with it

    proto = require_onnx(onnx_path, precision=precision, backend="onnxruntime")
    shares = weight_shares(proto)
    if device == "cpu" and half_share(shares):
        raise BadInput(
            f"{onnx_path}: ONNX Runtime's CPU kernels compute in float32 and this graph is "
            f"{precision_of_shares(shares)}; build the fp32 graph, or for cuda"
        )
    started = time.perf_counter()
    optimised = _optimise_graph(onnx_path, device, command)
    seconds = time.perf_counter() - started
    kernels = tuple(
        Kernel(name=node.name, kind=node.op_type, tactic="", types=None, nodes=(node.name,))
        for node in optimised.graph.node
    )
    return engine_from_plan(
        onnx_path,
        proto,
        onnx_bytes(optimised),
        fusion_fields(kernels, attention_sites(proto)),
        weights=optimised,
        half_kernel_share=None,
        backend="onnxruntime",
        memory=EngineMemory(reason=WITHOUT_MEMORY),
        library_version=importlib.metadata.version("onnxruntime" if device == "cpu" else "onnxruntime-gpu"),
        command=command,
        targets=(device,),
        gpu=None,
        profiles=(),
        build_seconds=seconds,
        options={"optimization": "extended"},
    )


def _optimise_graph(onnx_path: Path, device: str, command: str) -> onnx.ModelProto:
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
        if session.get_providers()[0] != provider:  # it is installed, but finds no GPU or library
            reason = f"{provider} could not start here; the session fell back to {session.get_providers()[0]}"
            raise Missing(missing_message("onnxruntime", reason, command, "the NVIDIA driver, CUDA and cuDNN"))
        return read_onnx(saved)
