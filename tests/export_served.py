"""Artefacts small enough for tests of packaging: a linear classifier as ONNX, stand-ins for its plan and package."""

import json
import os
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from export.engine.record import EngineMemory, EngineRecord, record_path, sha256_of
from export.graph.package_notes import PackageNotes
from export.graph.ports import GraphPort
from export.triton.pbtxt import Message, parse
from ground.built_engines import record_built_engine
from ground.files import sha256_of_file, write_json
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


def config_of(model: Path) -> Message:
    return parse((model / "config.pbtxt").read_text(encoding="utf-8"))


def replaced(path: Path, old: str, new: str) -> None:
    """Puts `new` for the first `old`, which must be there."""
    text = path.read_text(encoding="utf-8")
    assert old in text, (old, text)
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def run_script(script: Path, folder: Path, *words: str, exit_code: int = 0) -> list[str] | None:
    """What the last program that a build script starts is told, all of them stand-ins in this folder; None where it
    fails, as it does where the builder has another exit code.
    """
    written_down = "printf '%s\\0' \"$@\" > arguments"  # apart by a byte that no argument holds
    save = 'for each in "$@"; do case "$each" in --saveEngine=*) echo built > "${each#--saveEngine=}" ;; esac; done'
    tools = {"trtexec": f"{written_down}\n{save}\nexit {exit_code}", "nvidia-smi": "echo 12.0", "docker": written_down}
    (folder / "tools").mkdir(exist_ok=True)
    for name, body in tools.items():
        (folder / "tools" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "tools" / name).chmod(0o755)
    environment = {"PATH": f"{folder / 'tools'}:{os.defpath}", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["sh", str(script), *words], env=environment, capture_output=True, timeout=30, cwd=folder, check=False
    )
    return None if done.returncode else (folder / "arguments").read_bytes().decode().split("\0")[:-1]


def engine_record(plan: bytes = b"plan", graph: bytes = b"graph", **changes: Any) -> EngineRecord:
    """What a build of this graph for an SM 86 would have left beside this plan, or with changes."""
    port = GraphPort(name="images", dtype="float32", shape=("batch", *SHAPE))
    facts: dict[str, Any] = {
        "backend": "tensorrt", "library_version": "10.14.1.48", "command": "", "onnx_sha256": sha256_of(graph),
        "onnx_bytes": len(graph), "plan_sha256": sha256_of(plan), "plan_bytes": len(plan), "precision": "fp16",
        "half_weight_share": 1.0, "half_kernel_share": None, "targets": ("86",), "gpu": None, "profiles": ("1:4:16",),
        "inputs": (port,), "outputs": (replace(port, name="logits", shape=("batch", CLASSES)),), "kernels": None,
        "kernel_kinds": {}, "attention_sites": (), "fused_attention_sites": None, "build_seconds": 1.0, "options": {},
        "memory": EngineMemory(),
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
    write_json(record_path(path), record.to_json())
    return path


PACKAGE_NOTES = PackageNotes(
    inputs=(GraphPort(name="images", dtype="float32", shape=("batch", *SHAPE)),),
    outputs=(GraphPort(name="scores", dtype="float32", shape=("batch", CLASSES)),),
    roles={"scores": "logits"},
    precision="fp32",
    device="cpu",
    torch="2.15.0",
    carried={"AOTI_CPU_ISA": "AVX2", "corp_deploy.macs": "240", "corp_deploy.model_sha256": "00"},
)


def write_package(
    path: Path, notes: PackageNotes = PACKAGE_NOTES, metadata: Mapping[str, object] | None = None
) -> Path:
    """An archive with a package's notes and no code, counted as compiled here."""
    with zipfile.ZipFile(path, "w") as archive:
        text = json.dumps({**notes.as_metadata(), **(metadata or {})})
        archive.writestr("m/data/aotinductor/model/c0.wrapper_metadata.json", text)
        archive.writestr("m/data/aotinductor/model/c0.wrapper.so", b"code")
    record_built_engine(sha256_of_file(path))
    return path
