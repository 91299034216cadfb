"""Artefacts small enough for tests of packaging: a linear classifier as ONNX, a stand-in for its plan with a record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from export.engine.record import EngineRecord, record_path, sha256_of
from export.graph.ports import GraphPort
from ground.built_engines import record_built_engine
from tests.graphs import graph_of

SHAPE = (3, 4, 4)
CLASSES = 5


def write_onnx(
    path: Path,
    *,
    batch: int | None = None,
    shape: tuple[int, int, int] = SHAPE,
    classes: int = CLASSES,
    opset: int = 20,
    ir: int = 10,
    seed: int = 0,
) -> Path:
    """images [batch,*shape] -> logits [batch,classes], logits = flat @ W + b with weights of the given seed."""
    rng = np.random.default_rng(seed)
    size: int | str = "batch" if batch is None else batch
    weights = rng.standard_normal((int(np.prod(shape)), classes)).astype(np.float32)
    bias = rng.standard_normal(classes).astype(np.float32)
    model = graph_of(
        f"""(float[{size},{",".join(map(str, shape))}] images) => (float[{size},{classes}] logits) {{
            flat = Flatten<axis=1>(images)
            product = MatMul(flat, weights)
            logits = Add(product, bias)
        }}""",
        opset=opset, ir=ir, weights=weights, bias=bias,
    )  # fmt: skip
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def engine_record(plan: bytes = b"plan", graph: bytes = b"graph", **changes: Any) -> EngineRecord:
    """What a build of this graph for an SM 86 would have left beside this plan, or with changes."""
    port = GraphPort(name="images", dtype="float32", shape=("batch", *SHAPE))
    facts: dict[str, Any] = {
        "backend": "tensorrt", "library_version": "10.14.1.48", "command": "", "onnx_sha256": sha256_of(graph),
        "onnx_bytes": len(graph), "plan_sha256": sha256_of(plan), "plan_bytes": len(plan), "precision": "fp16",
        "half_weight_share": 1.0, "half_kernel_share": None, "targets": ("86",), "gpu": None, "profiles": ("1:4:16",),
        "inputs": (port,), "outputs": (replace(port, name="logits", shape=("batch", CLASSES)),), "kernels": None,
        "kernel_kinds": {}, "attention_sites": (), "fused_attention_sites": None, "build_seconds": 1.0, "options": {},
    }  # fmt: skip
    return EngineRecord(**facts | changes)


def write_plan(
    path: Path,
    onnx_path: Path,
    *,
    profiles: tuple[str, ...] = ("1:4:16",),
    target: str = "86",
    backend: str = "tensorrt",
    version: str = "10.14.1.48",
    batch: int | str = "batch",
    compatible: bool = False,
) -> Path:
    """Some bytes in place of a plan, and what a build would have left: the record beside them, and its note."""
    plan = b"plan for " + target.encode()
    path.write_bytes(plan)
    record_built_engine(sha256_of(plan))
    record = engine_record(
        plan, onnx_path.read_bytes(), backend=backend, library_version=version, targets=(target,), profiles=profiles,
        inputs=(GraphPort(name="images", dtype="float32", shape=(batch, *SHAPE)),),
        outputs=(GraphPort(name="logits", dtype="float32", shape=(batch, CLASSES)),),
        options={"version_compatible": compatible},
    )  # fmt: skip
    record_path(path).write_text(record.to_json())
    return path
