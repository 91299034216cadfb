"""Artefacts small enough for tests of packaging: a linear classifier as ONNX, a stand-in for its plan with a record."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.engine.record import EngineRecord, record_path, sha256_of
from export.graph.ports import GraphPort
from ground.built_engines import record_built_engine

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
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"], axis=1),
            helper.make_node("MatMul", ["flat", "weights"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [size, *shape])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [size, classes])],
        [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(bias, "bias")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


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
    path.write_bytes(b"plan for " + target.encode())
    record_built_engine(sha256_of(path.read_bytes()))
    record = EngineRecord(
        backend=backend, library_version=version, command="", onnx_sha256=sha256_of(onnx_path.read_bytes()),
        onnx_bytes=onnx_path.stat().st_size, plan_sha256=sha256_of(path.read_bytes()), plan_bytes=path.stat().st_size,
        precision="fp16", half_weight_share=1.0, half_kernel_share=None, targets=(target,), gpu=None,
        profiles=profiles, inputs=(GraphPort(name="images", dtype="float32", shape=(batch, *SHAPE)),),
        outputs=(GraphPort(name="logits", dtype="float32", shape=(batch, CLASSES)),), kernels=None, kernel_kinds={},
        attention_sites=(), fused_attention_sites=None, build_seconds=1.0, options={"version_compatible": compatible},
    )  # fmt: skip
    record_path(path).write_text(record.to_json())
    return path
