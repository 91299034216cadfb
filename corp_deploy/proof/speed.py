"""Timing of a dense against a reduced model on this machine; two graphs or engines are timed without torch."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from corp_deploy.invocation.running import BenchOptions, Device, FedOptions, RunOptions
from corp_deploy.invocation.table import BENCH
from corp_deploy.store.fitted import fitted_inputs
from export.engine.record import record_of_plan
from export.graph.package_notes import SUFFIX, is_for_gpu
from ground.errors import BadInput, Missing
from ground.feeds import random_feeds
from ground.files import replacing
from ground.ports import Port
from perf.bench.bench import bench_subjects
from perf.bench.energy import EnergyMeter
from perf.record.runs import Bench, save_bench
from perf.runners.cuda import read_gpu_uuid
from perf.stats.summary import summarise
from perf.timing.energy import UNMEASURED, NoSensor, open_sensor
from perf.timing.laps import Plan
from perf.timing.watch import Watch, environment, watching

from .contender import Contender, contender_from_engine, contender_from_graph, contender_from_pt2
from .launches import time_launches
from .proof_inputs import ProofInputs, ports_line

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint

# Without a limit by the user: large models have time for an interval, small ones stop once it is narrow enough.
SPEED_PLAN = Plan(time_limit_s=120.0, max_rounds=50, half_width_rel=0.02, noise_rounds=0)


def way_to_run(path: Path, running: RunOptions) -> str:
    """Return the runtime's name for a file or directory, a key of BENCH.variants; raise BadInput for other paths."""
    if path.suffix == ".plan" and path.is_file():
        backend = record_of_plan(path).backend
        if backend not in BENCH.variants:
            raise BadInput(f"{path}: built for {backend}, which runs .onnx files; rename it to .onnx")
        return backend
    if path.suffix == ".onnx" and path.is_file():
        return _runtime_of_graphs(running)
    if path.suffix == SUFFIX and path.is_file():
        return f"aotinductor-file{'-cuda' * is_for_gpu(path)}"
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
    """Return the device of both models; raise BadInput for ignored options and for two devices."""
    ways = {path: way_to_run(path, running) for path in (dense, reduced)}
    BENCH.refuse([(path.name, way) for path, way in ways.items()], running.non_default)
    one, other = (BENCH.variants[ways[path]] for path in (dense, reduced))
    if one.supported["device"] != other.supported["device"]:
        raise BadInput(
            f"{dense} would run in {one.label} and {reduced} in {other.label}, and a CPU's times say nothing of a "
            "GPU's; expected both on one device: --provider cuda runs a graph on the GPU, --device cuda a module"
        )
    return "cuda" if one.supported["device"] == ("cuda",) else "cpu"


def _contender(
    name: str, path: Path, running: RunOptions, scratch: Path, fed: FedOptions, batches: Sequence[int]
) -> Contender:
    if path.suffix == ".plan":
        return contender_from_engine(name, path, running)
    if path.suffix == ".onnx":
        return contender_from_graph(name, path, running)
    if path.suffix == SUFFIX:
        return contender_from_pt2(name, path, fed.images, running)
    from .model_contender import contender_from_directory

    return contender_from_directory(name, path, running, scratch, batches)


def _timed_inputs(fed: FedOptions, ports: Sequence[Port], models: Sequence[Path], count: int) -> ProofInputs:
    """Return inputs for the largest batch: those of a file, or noise, which takes the same time."""
    if fed.text is None and fed.images is None:
        return ProofInputs(feeds=random_feeds(ports, count, seed=0), kind="inputs")
    from .model_inputs import open_timed_inputs

    return open_timed_inputs(fed, ports, models, count)


def _refuse_unequal(dense: Contender, reduced: Contender, batches: Sequence[int]) -> None:
    one, other = ([(port.dtype, port.shape) for port in each.inputs] for each in (dense, reduced))
    if one != other:  # names may differ
        raise BadInput(
            f"{dense.name} takes {ports_line(dense.inputs)}, {reduced.name} {ports_line(reduced.inputs)}; expected "
            "equal inputs"
        )
    for contender in (dense, reduced):
        if contender.static_batch is not None and list(batches) != [contender.static_batch]:
            raise BadInput(
                f"{contender.name}: its batch is fixed at {contender.static_batch}, asked for {list(batches)}; "
                f"measure --batch {contender.static_batch}, or export with a dynamic batch"
            )


@contextmanager
def _open_meter(
    device: Device, uuid: str | None, limit_s: float, watch: Watch, running: RunOptions
) -> Iterator[EnergyMeter | NoSensor]:
    if not limit_s:
        yield UNMEASURED
    elif running.flush_l2:
        yield NoSensor("a flush of the L2 cache takes energy itself", "measure energy without --flush-l2")
    else:
        with open_sensor(device, uuid) as found:
            yield found if isinstance(found, NoSensor) else EnergyMeter(sensor=found, limit_s=limit_s, watch=watch)


def time_models(
    dense: Path,
    reduced: Path,
    *,
    batches: Sequence[int],
    plan: Plan,
    running: RunOptions | None = None,
    fed: FedOptions | None = None,
    energy_s: float = 0.0,
    names: tuple[str, str] = ("dense", "reduced"),
    command: Sequence[str] = (),
    progress: Callable[[float, str], None] | None = None,
) -> Bench:
    """Time a dense and a reduced model, interleaved in one process.

    `fed` selects real inputs; None feeds noise, which takes the same time. `names` are those of the record. The plan's
    time limit includes exporting and compiling; `energy_s` is the time limit of energy. Raises BadInput if the models
    take different inputs or devices, or a batch size doesn't fit.
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
        timed = _timed_inputs(fed, one.inputs, (dense, reduced), max(batches))
        uuid = read_gpu_uuid() if device == "cuda" else None
        with watching(uuid) as (watch, gpu), _open_meter(device, uuid, energy_s, watch, running) as meter:
            measured = bench_subjects(
                (one, other),
                timed.feeds,
                batches,
                plan,
                streams=running.streams or 1,
                flush_l2=bool(running.flush_l2),
                described=environment(gpu),
                command=command,
                watch=watch,
                meter=meter,
                progress=progress,
                made_s=perf_counter() - began_s,
            )
    fitted = fitted_inputs(timed.fingerprints, (one.fitted, other.fitted), noun=timed.kind)
    remarks = () if fitted is None or not fitted.has_overlap else (fitted.warning,)
    return replace(measured, warnings=(*measured.warnings, *remarks), fitted=fitted)


def bench_models(
    dense: Path,
    reduced: Path,
    options: BenchOptions,
    *,
    fed: FedOptions,
    output: Path | None,
    command: Sequence[str] = (),
    progress: Callable[[float, str], None] | None = None,
) -> Bench:
    """Time a dense and a reduced model as the options of `bench` say, and write the record to `output`."""
    if options.launches > 1:
        bench = time_launches(dense, reduced, options, fed=fed, command=command, progress=progress)
    else:
        bench = time_models(
            dense,
            reduced,
            batches=options.batches,
            plan=options.plan,
            running=options.running,
            fed=fed,
            energy_s=options.energy_limit_s,
            names=options.names,
            command=command,
            progress=progress,
        )
    if output is not None:
        with replacing(output) as temporary:
            save_bench(bench, temporary)
    return bench


def measure_speedup(dense: "Checkpoint", directory: Path, batch: int) -> float:
    """Return the dense over the reduced median latency in ONNX Runtime, interleaved; raise Missing if it can't run."""
    from corp_deploy.store.checkpoint import save

    with tempfile.TemporaryDirectory() as scratch:
        save(dense, Path(scratch))
        compared = time_models(Path(scratch), directory, batches=(batch,), plan=SPEED_PLAN)
    (row,) = summarise(compared).rows
    if row.speedup is None:
        raise Missing(f"{directory}: written, but its speed-up can't be measured here: {'; '.join(compared.warnings)}")
    return row.speedup.value
