"""Dense against reduced on this machine: what the two are, how they run, and perf's interleaved measurement of them."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import Device, FedOptions, RunOptions
from corp_deploy.invocation.table import BENCH
from corp_deploy.proof.inputs import feeds_to_time, listed
from corp_deploy.store.checkpoint import WEIGHTS, Checkpoint, fitted_inputs, fitted_of_lineage, save
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.onnx_file import GraphFacts, export_checkpoint, facts_of_onnx
from export.engine.record import EngineRecord, record_of_plan
from ground.errors import BadInput, Missing
from ground.files import sha256_of_file
from perf.bench.bench import bench
from perf.record.runs import Bench
from perf.runners.cuda import first_uuid
from perf.runners.engine import EngineRunner
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.runners.openvino import OpenVinoRunner
from perf.runners.protocol import Runner
from perf.stats.summary import summarise
from perf.timing.laps import Plan
from perf.timing.watch import environment, watching

from .candidates import fixed_ports
from .engine_trust import record_of_trusted_plan
from .torch_package import Contender, compiled_contender, contender_from_package, costs_of, facts_of_file

# Nobody asked for a limit: a large model has the time that an interval takes, a small one stops once it is known.
SPEED_PLAN = Plan(time_limit_s=120.0, max_rounds=50, half_width_rel=0.02, noise_rounds=0)


def _from_module(name: str, checkpoint: Checkpoint, weights: Path, running: RunOptions) -> Contender:
    inputs = input_ports(checkpoint.model)
    open_module = partial(
        ModuleRunner,
        checkpoint.model,
        inputs=inputs,
        outputs=output_ports(checkpoint.model),
        device=running.device or "cpu",
        mode=running.mode or "eager",
        precision=running.dtype or "fp32",
        threads=running.threads,
        flush_l2=bool(running.flush_l2),
        label=weights.parent.name,
    )
    return Contender(name=name, open=open_module, inputs=inputs, **costs_of(checkpoint), **facts_of_file(weights))


def _from_onnx(name: str, path: Path, running: RunOptions) -> Contender:
    facts = facts_of_onnx(path)
    for port in facts.inputs:
        if min(port.shape, default=1) < 0:
            sizes = ", ".join("?" if size < 0 else str(size) for size in port.shape)
            raise BadInput(f"{path}: takes {port.name} of no fixed size ({sizes}); export it for one size")
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
    """What the graph that an engine was built from says of its cost, where it still stands beside the plan."""
    for graph in sorted(path.parent.glob("*.onnx")):
        if graph.stat().st_size == record.onnx_bytes and sha256_of_file(graph) == record.onnx_sha256:
            return facts_of_onnx(graph)
    return None


def _from_engine(name: str, path: Path, running: RunOptions) -> Contender:
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


def way_to_run(path: Path, running: RunOptions) -> str:
    """What would run it, by its name in the table of options. Raises BadInput for what nothing here runs."""
    if path.suffix == ".plan" and path.is_file():
        backend = record_of_plan(path).backend
        if backend not in BENCH.variants:
            raise BadInput(f"{path}: built for {backend}, which runs .onnx files; name the graph so")
        return backend
    if path.suffix == ".onnx" and path.is_file():
        return _runtime_of_graphs(running)
    if path.suffix == ".pt2" and path.is_file():
        return "aotinductor-file"
    if not path.is_dir():
        raise BadInput(
            f"{path}: expected an .onnx file, a .plan, a .pt2 of AOTInductor, a directory written by corp-deploy or a "
            "snapshot of one of timm's repositories"
        )
    if running.backend == "aotinductor":
        return "aotinductor"
    return f"torch-{running.device or 'cpu'}" if running.backend == "torch" else _runtime_of_graphs(running)


def _runtime_of_graphs(running: RunOptions) -> str:
    return "openvino" if running.backend == "openvino" else f"onnxruntime-{running.provider or 'cpu'}"


def _device_of_both(dense: Path, reduced: Path, running: RunOptions) -> Device:
    """Where both run. Raises BadInput for options that would be ignored, and for two that would run apart."""
    ways = {path: way_to_run(path, running) for path in (dense, reduced)}
    BENCH.refuse([(path.name, way) for path, way in ways.items()], running.non_default)
    one, other = (BENCH.variants[ways[path]] for path in (dense, reduced))
    if one.supported["device"] != other.supported["device"]:
        raise BadInput(
            f"{dense} would run in {one.label} and {reduced} in {other.label}, and a CPU's times say nothing of a "
            "GPU's; expected both in one place: --provider cuda takes a graph to the GPU, --device cuda a module"
        )
    return "cuda" if one.supported["device"] == ("cuda",) else "cpu"


def _contender(
    name: str, path: Path, running: RunOptions, scratch: Path, fed: FedOptions, batches: Sequence[int]
) -> Contender:
    if path.suffix == ".pt2":
        return contender_from_package(name, path, fed.images, running)
    if path.suffix == ".plan":
        return _from_engine(name, path, running)
    if path.suffix == ".onnx":
        return _from_onnx(name, path, running)
    checkpoint = model_of_directory(path)
    fitted = fitted_of_lineage(checkpoint.lineage, where=str(path))
    if running.backend == "torch":
        if not (path / WEIGHTS).is_file():  # a snapshot, whose weights may be of another kind or in several files
            path = scratch / name / path.name
            save(checkpoint, path)
        made = _from_module(name, checkpoint, path / WEIGHTS, running)
    elif running.backend == "aotinductor":
        made = compiled_contender(name, checkpoint, scratch / f"{name}.pt2", running, path.name, batches)
    else:
        graph = scratch / f"{name}.onnx"
        export_checkpoint(checkpoint, graph, precision="fp32")
        made = _from_onnx(name, graph, running)
    return replace(made, fitted=fitted)


def _refuse_unequal(dense: Contender, reduced: Contender, batches: Sequence[int]) -> None:
    one, other = ([(port.dtype, port.shape) for port in each.inputs] for each in (dense, reduced))
    if one != other:  # whatever they are called
        raise BadInput(
            f"{dense.name} takes {listed(dense.inputs)}, {reduced.name} {listed(reduced.inputs)}: not the same task"
        )
    for contender in (dense, reduced):
        if contender.static_batch is not None and list(batches) != [contender.static_batch]:
            raise BadInput(
                f"{contender.name}: its batch is fixed at {contender.static_batch}, asked for {list(batches)}; "
                f"measure --batch {contender.static_batch}, or export with a dynamic batch"
            )


def measure(
    dense: Path,
    reduced: Path,
    *,
    batches: Sequence[int],
    plan: Plan,
    running: RunOptions | None = None,
    fed: FedOptions | None = None,
    names: tuple[str, str] = ("dense", "reduced"),
    command: Sequence[str] = (),
    progress: Callable[[float, str], None] | None = None,
) -> Bench:
    """Time a dense and a reduced model in one process. Raises BadInput for models that don't go together.

    `fed` tells of real inputs; None feeds noise, which costs the same time. `names`: what the record calls both. What
    exporting and compiling take is part of the plan's time.
    """
    began_s = perf_counter()
    if names[0] == names[1]:
        raise BadInput(f"both models are called {names[0]!r}; give each a name of its own")
    running, fed = running or RunOptions(), fed or FedOptions()
    device = _device_of_both(dense, reduced, running)
    with tempfile.TemporaryDirectory() as scratch:
        both = zip(names, (dense, reduced), strict=True)
        one, other = (_contender(name, path, running, Path(scratch), fed, batches) for name, path in both)
        _refuse_unequal(one, other, batches)
        timed = feeds_to_time(fed, one.inputs, (dense, reduced), max(batches))
        with watching(first_uuid() if device == "cuda" else None) as (watch, gpu):
            measured = bench(
                (one, other),
                timed.feeds,
                batches,
                plan,
                streams=running.streams or 1,
                flush_l2=bool(running.flush_l2),
                described=environment(gpu),
                command=command,
                watch=watch,
                progress=progress,
                made_s=perf_counter() - began_s,
            )
    fitted = fitted_inputs(timed.fingerprints, (one.fitted, other.fitted), noun=timed.kind)
    remarks = () if fitted is None or not fitted.has_overlap else (fitted.warning,)
    return replace(measured, warnings=(*measured.warnings, *remarks), fitted=fitted)


def measured_speedup(dense: Checkpoint, directory: Path, batch: int) -> float:
    """Dense over reduced median latency in ONNX Runtime, interleaved, to hold a prediction against."""
    with tempfile.TemporaryDirectory() as scratch:
        save(dense, Path(scratch))
        compared = measure(Path(scratch), directory, batches=(batch,), plan=SPEED_PLAN)
    (row,) = summarise(compared).rows
    if row.speedup is None:
        raise Missing(f"{directory}: written, but its speed-up can't be measured here: {'; '.join(compared.warnings)}")
    return row.speedup.value
