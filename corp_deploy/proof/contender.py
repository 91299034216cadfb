"""Graphs, engines and packages as subjects of a benchmark, with ports, costs and runners. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from calib.fingerprints_text import FingerprintsText
from corp_deploy.invocation.running import RunOptions
from corp_deploy.store.graph_facts import GraphFacts, facts_of_onnx, facts_of_package
from export.engine.record import EngineRecord
from export.graph.package_notes import PackageNotes, notes_of_package
from ground.arrays import array_from_npy
from ground.errors import BadInput
from ground.files import sha256_of_file
from ground.places import Place, require_path
from ground.ports import Port
from perf.bench.bench import BenchSubject
from perf.runners.engine import EngineRunner
from perf.runners.onnx import OnnxRunner
from perf.runners.openvino import OpenVinoRunner
from perf.runners.protocol import Runner

from .candidates import fixed_ports, package_runner
from .engine_trust import record_of_trusted_plan, require_trusted_package


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender(BenchSubject):
    """A model to time, with its input ports, its batch size if fixed, and the inputs of its fit if known."""

    inputs: tuple[Port, ...]
    static_batch: int | None = None
    fitted: FingerprintsText | None = None


def facts_of_file(path: Path) -> dict[str, Any]:
    return {"size_bytes": path.stat().st_size, "sha256": sha256_of_file(path)}


def contender_from_graph(name: str, path: Path, running: RunOptions) -> Contender:
    facts = facts_of_onnx(path)
    for port in facts.inputs:
        if min(port.shape, default=1) < 0:
            sizes = ", ".join("?" if size < 0 else str(size) for size in port.shape)
            raise BadInput(f"{path}: its input {port.name} has no fixed size ({sizes}); export it for one size")
    if running.backend == "openvino":
        opened: Callable[[], Runner] = partial(OpenVinoRunner, path, arithmetic=running.dtype, threads=running.threads)
    else:
        opened = partial(
            OnnxRunner,
            path,
            provider=running.provider or "cpu",
            threads=running.threads,
            cuda_graph=running.cuda_graph,
            flush_l2=bool(running.flush_l2),
        )
    return Contender(
        name=name,
        open=opened,
        macs=facts.macs,
        params=facts.parameters,
        inputs=facts.inputs,
        static_batch=facts.batch,
        fitted=facts.fitted,
        **facts_of_file(path),
    )


def _graph_of_engine(path: Path, record: EngineRecord) -> GraphFacts | None:
    """Return facts of the graph that an engine was built from, or None if no file beside the plan has its digest."""
    for graph in sorted(path.parent.glob("*.onnx")):
        if graph.stat().st_size == record.onnx_bytes and sha256_of_file(graph) == record.onnx_sha256:
            return facts_of_onnx(graph)
    return None


def contender_from_engine(name: str, path: Path, running: RunOptions) -> Contender:
    record = record_of_trusted_plan(path)
    facts = _graph_of_engine(path, record)
    open_engine = partial(
        EngineRunner,
        path,
        backend="tensorrt_rtx" if record.backend == "tensorrt-rtx" else "tensorrt",
        cuda_graph=running.cuda_graph,
        flush_l2=bool(running.flush_l2),
        precision=record.precision,
        sha256=record.plan_sha256,
    )
    return Contender(
        name=name,
        open=open_engine,
        macs=None if facts is None else facts.macs,
        params=None if facts is None else facts.parameters,
        size_bytes=record.plan_bytes,
        sha256=record.plan_sha256,
        fused_attention=record.fused_attention,
        sparse_layers=record.sparse_layers,
        plan_bytes=record.plan_bytes,
        device_memory=record.device_memory_bytes or None,
        inputs=fixed_ports(record.inputs, path, remedy="; build it from a graph of one size"),
        fitted=None if facts is None else facts.fitted,
    )


def contender_from_package(name: str, path: Path, notes: PackageNotes, running: RunOptions) -> Contender:
    facts = facts_of_package(path)
    return Contender(
        name=name,
        open=partial(package_runner, path, notes, threads=running.threads, flush_l2=bool(running.flush_l2)),
        macs=facts.macs,
        params=facts.parameters,
        inputs=facts.inputs,
        static_batch=facts.batch,
        fitted=facts.fitted,
        **facts_of_file(path),
    )


def port_of_images(images: Place | None, package: Path) -> Port:
    """Return the input port of a package without notes by its images; raise BadInput unless `images` is a .npy file."""
    if images is None or images.suffix != ".npy":
        raise BadInput(
            f"{package}: a package doesn't record its inputs unless `export --format aoti` wrote it; expected --images "
            f"FILE.npy with preprocessed inputs [N, ...] of its size, got {images or 'none'}"
        )
    try:
        shape = array_from_npy(require_path(images), mapped=True).shape
    except OSError as error:
        raise BadInput(f"{images}: can't be read as an array ({error})") from None
    return Port(name="images", shape=tuple(shape[1:]))


def contender_from_pt2(name: str, path: Path, images: Place | None, running: RunOptions) -> Contender:
    """Open a package of AOTInductor; raise BadInput unless it was compiled here or is trusted.

    The input of a package without notes, from another tool and for the CPU, is that of the images.
    """
    require_trusted_package(path)
    try:
        notes = notes_of_package(path)
    except BadInput:
        from perf.runners.torch_package import PackageRunner

        inputs = (port_of_images(images, path),)
        opened = partial(PackageRunner, path, inputs=inputs, threads=running.threads)
        return Contender(name=name, open=opened, inputs=inputs, **facts_of_file(path))
    return contender_from_package(name, path, notes, running)
