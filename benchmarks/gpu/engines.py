"""Engines on this GPU: does TensorRT-RTX load here, what full TensorRT fuses for each head geometry, and parity.

Every backend that is not installed is a row that says so. FP16 graphs of random weights at half the widths. Plans of
full TensorRT are timed dense beside reduced by perf's harness; the chain of parity ends at what was built here.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import models
from benchmarks.gpu.record import Record, Row, Task, reason_of
from benchmarks.gpu.setting import GEOMETRIES, Setting
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint, save
from ground.errors import BadInput as NotLoaded
from ground.errors import Missing
from ground.feeds import feeds_from_array, single_array

MODEL, SPARSITY = "DeiT-S", 0.5
BATCHES = (1, 8, 64)
VARIANTS = ("dense", *GEOMETRIES)
PROVED_IMAGES, PROVED_BATCHES = 16, (1, 8)


def model_name(setting: Setting) -> str:
    return MODEL if MODEL in setting.models else next(iter(setting.models))


def checkpoint_of(variant: str, setting: Setting) -> Checkpoint:
    """The model of the engines, dense or reduced, on the CPU."""
    at_cpu = Setting(device="cpu", small=setting.small, everything=False, cache=setting.cache)
    name = model_name(setting)
    model = models.dense(name, at_cpu)
    if variant != "dense":
        geometry = next(each for each in GEOMETRIES if each == variant)
        model = models.reduced(model, SPARSITY, geometry, at_cpu)
    return Checkpoint(model=model, architecture=models.architecture(name, setting), lineage={})


@contextmanager
def graph_of(variant: str, setting: Setting, precision: str = "fp16") -> Iterator[Path]:
    """The variant's ONNX file for as long as the context is open."""
    from corp_deploy.store.onnx_file import export_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{variant}.onnx"
        geometry: HeadGeometry | None = "ragged" if variant == "ragged" else None
        export_checkpoint(checkpoint_of(variant, setting), path, precision=precision, geometry=geometry)
        yield path


def pixels(setting: Setting, count: int) -> NDArray[np.float32]:
    shape = (count, 3, setting.image_size, setting.image_size)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def built(path: Path, backend: str) -> Row:
    """Build a plan beside the graph and say what it holds."""
    from export.engine.build import build_engine, write_engine
    from export.engine.options import BatchProfile, BuildOptions
    from export.engine.session import open_library

    library = open_library(backend)
    profile = BatchProfile(smallest=BATCHES[0], tuned=BATCHES[1], largest=BATCHES[-1])
    engine = build_engine(path, BuildOptions(backend=backend, profiles=(profile,)), library=library)
    write_engine(engine, path.with_suffix(".plan"))
    record = engine.record
    return {
        "backend": backend,
        "version": record.library_version,
        "targets": list(record.targets),
        "plan_bytes": record.plan_bytes,
        "build_seconds": record.build_seconds,
        "kernels": record.kernels,
        "fused_attention": record.fused_attention,
        "attention_sites": len(record.attention_sites),
    }


def loads(path: Path, backend: str, setting: Setting) -> Row:
    """Whether a plan loads and runs here, and how far its answer is from torch's; else the reason."""
    from perf.runners.engine import EngineRunner
    from perf.runners.module import ModuleRunner

    images = pixels(setting, 8)
    try:
        with EngineRunner(path, backend="tensorrt_rtx" if backend == "tensorrt-rtx" else "tensorrt") as runner:
            given = single_array(runner(feeds_from_array(images, runner.inputs)))
    except (NotLoaded, RuntimeError, AssertionError) as error:
        return {"loads": False, "reason_not_loaded": reason_of(error)}
    with ModuleRunner(checkpoint_of(path.stem, setting).model) as plain:
        wanted = single_array(plain(feeds_from_array(images, plain.inputs)))
    return {"loads": True, "relative_error": float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))}


def rtx(setting: Setting) -> Row:
    """Does a portable TensorRT-RTX plan load on this compute capability? Its builder needs no GPU, its runtime does."""
    with graph_of("dense", setting) as path:
        row = {"row": "rtx", "model": model_name(setting), **built(path, "tensorrt-rtx")}
        plan = path.with_suffix(".plan")
        if setting.device != "cuda":
            return row | {"loads": None, "reason_not_loaded": "asked for the CPU: not tried"}
        return row | {"validity": validity(plan)} | loads(plan, "tensorrt-rtx", setting)


def validity(plan: Path) -> str:
    """What the runtime's own check says of the plan, before it is loaded."""
    import tensorrt_rtx as trt

    return str(trt.Runtime(trt.Logger(trt.Logger.ERROR)).get_engine_validity(plan.read_bytes()))


def tensorrt(variant: str, setting: Setting) -> Row:
    """One variant in full TensorRT: kernels by the inspector, fused attention, answer."""
    with graph_of(variant, setting) as path:
        facts = built(path, "tensorrt")
        return {"row": "tensorrt", "model": model_name(setting), "variant": variant, **facts} | loads(
            path.with_suffix(".plan"), "tensorrt", setting
        )


def speed(variant: str, setting: Setting, runs: Callable[[Path, Path], Any]) -> Row:
    """Dense beside one geometry, engine against engine or graph against graph."""
    from corp_deploy.views.speed import speed_record

    with graph_of("dense", setting) as dense, graph_of(variant, setting) as reduced:
        return {"row": "speed", "model": model_name(setting), "variant": variant, **speed_record(runs(dense, reduced))}


def in_tensorrt(dense: Path, reduced: Path) -> Any:
    from corp_deploy.invocation.running import RunOptions
    from corp_deploy.proof.speed import measure
    from perf.timing.laps import Plan

    for path in (dense, reduced):
        built(path, "tensorrt")
    plans = (path.with_suffix(".plan") for path in (dense, reduced))
    running = RunOptions(device="cuda", mode="cuda_graph")
    return measure(*plans, batches=BATCHES, plan=Plan(time_limit_s=10.0), running=running)


def in_onnxruntime(dense: Path, reduced: Path) -> Any:
    from corp_deploy.invocation.running import RunOptions
    from corp_deploy.proof.speed import measure
    from perf.timing.laps import Plan

    return measure(dense, reduced, batches=BATCHES, plan=Plan(time_limit_s=10.0), running=RunOptions(provider="cuda"))


def proved(setting: Setting, backend: str | None) -> Row:
    """The chain: dense torch, reduced torch, ONNX FP32, ONNX FP16 and, where there is a backend, its engine."""
    from corp_deploy.proof.candidates import candidate_from_path
    from corp_deploy.proof.chain import prove_chain
    from corp_deploy.proof.limits import ParityLimits
    from corp_deploy.proof.model_inputs import random_inputs
    from corp_deploy.store.onnx_file import export_checkpoint

    dense, reduced = (checkpoint_of(variant, setting) for variant in ("dense", "padded"))
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "reduced"
        save(reduced, at)
        for precision, name in (("fp32", "model.onnx"), ("fp16", "model.fp16.onnx")):
            export_checkpoint(reduced, at / name, precision=precision)
        steps = [at, at / "model.onnx", at / "model.fp16.onnx"]
        if backend is not None:
            built(steps[-1], backend)
            steps.append(steps[-1].with_suffix(".plan"))
        candidates = [candidate_from_path(step) for step in steps]
        given = random_inputs(dense, 4 if setting.small else PROVED_IMAGES, 0)
        batches = (1, 2) if setting.small else PROVED_BATCHES
        parity = prove_chain(dense, candidates, given, batches=batches, limits=ParityLimits()).parity
    links = [{"name": each.name, "status": each.status, **asdict(each.measures)} for each in parity.links]
    failed = [asdict(each) for each in parity.structure if each.status == "FAIL"]
    return {"row": "parity", "model": model_name(setting), "backend": backend, "links": links, "structure": failed}


def require_gpu(setting: Setting) -> None:
    """Raises Missing in a run that was asked for the CPU: full TensorRT builds for the GPU it runs on."""
    if setting.device != "cuda":
        raise Missing("full TensorRT builds on a GPU; this run was asked for the CPU")


def in_cuda_provider(variant: str, setting: Setting) -> Row:
    """Dense beside one geometry in ONNX Runtime. Raises perf's Missing without its CUDA provider."""
    import onnxruntime

    from perf.runners.onnx_session import require_provider

    require_provider(onnxruntime.get_available_providers(), "cuda")
    return speed(variant, setting, in_onnxruntime) | {"backend": "onnxruntime-cuda"}


def has_cuda_provider() -> bool:
    """Whether ONNX Runtime is there and built for GPUs."""
    try:
        import onnxruntime
    except ImportError:
        return False
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def in_full_tensorrt(work: Callable[[], Row], setting: Setting) -> Row:
    """The row, or ImportError or Missing before anything is made."""
    import_module("tensorrt")
    require_gpu(setting)
    return {**work(), "backend": "tensorrt"}


def seconds_of(module: str, setting: Setting, seconds: float) -> float:
    """An estimate: nothing where the module is absent, as saying so takes no time."""
    return seconds if find_spec(module) and setting.device == "cuda" and not setting.small else 0.0


def tasks(setting: Setting, record: Record) -> list[Task]:
    """The question about TensorRT-RTX first; then full TensorRT; then ONNX Runtime's CUDA provider."""

    def in_tensorrt_task(key: str, seconds: float, work: Callable[[], Row]) -> Task:
        estimate_s = seconds_of("tensorrt", setting, seconds)
        return Task(key=key, estimate_s=estimate_s, run=partial(in_full_tensorrt, work, setting))

    rtx_s = seconds_of("tensorrt_rtx", setting, 6.0)
    made = [Task(key="tensorrt-rtx on this GPU", estimate_s=rtx_s, run=partial(rtx, setting))]
    made += [in_tensorrt_task(f"tensorrt {each}", 30.0, partial(tensorrt, each, setting)) for each in VARIANTS]
    made.append(in_tensorrt_task("parity of the chain", 40.0, partial(proved, setting, "tensorrt")))
    for each in GEOMETRIES:
        made.append(in_tensorrt_task(f"tensorrt speed {each}", 80.0, partial(speed, each, setting, in_tensorrt)))
    for each in GEOMETRIES:
        estimate_s = seconds_of("onnxruntime", setting, 20.0) if has_cuda_provider() else 0.0
        run = partial(in_cuda_provider, each, setting)
        made.append(Task(key=f"onnxruntime-cuda speed {each}", estimate_s=estimate_s, run=run))
    return made
