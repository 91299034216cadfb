"""Timing of a sweep's trials against the dense model, and builds of their engines."""

from collections.abc import Sequence
from pathlib import Path

from corp_deploy.invocation.running import RunOptions, SweepSpeedChoice
from corp_deploy.proof.speed import time_models
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.input_sets import model_digest
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.build import Engine, build_engine, write_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.effort import Stopwatch
from perf.record.runs import save_bench
from perf.runners.protocol import build_stopwatch
from perf.stats.summary import summarise
from perf.timing.laps import Plan
from perf.timing.watch import environment, fingerprint

from .sweep_points import EngineFigures, speed_from_row
from .sweep_trials import BENCH, EngineBuilt, Timing, TrialFolder, digest_of_values

PLAN_FILE, GRAPH_FILE = "engine.plan", "model.onnx"
ENGINE_PRECISION = "fp16"


def _running(speed: SweepSpeedChoice) -> RunOptions:
    """Return the options with which `bench` runs the trials."""
    match speed.bench:
        case "torch":
            dtype = None if speed.precision == "fp32" else speed.precision
            return RunOptions(backend="torch", device=speed.device, dtype=dtype, threads=speed.threads)
        case "openvino":
            return RunOptions(backend="openvino", threads=speed.threads)
        case "onnxruntime":
            return RunOptions(provider="cuda" if speed.device == "cuda" else None, threads=speed.threads)
    return RunOptions()


def _engine(speed: SweepSpeedChoice, graph: Path) -> Engine:
    """Build an engine whose one profile covers every batch size that is measured."""
    assert speed.engine is not None
    profile = BatchProfile(smallest=min(speed.batch), tuned=max(speed.batch), largest=max(speed.batch))
    options = BuildOptions(backend=speed.engine, precision=ENGINE_PRECISION, profiles=(profile,), sms=speed.sm)
    return build_engine(graph, options)


class SweepBench:
    """A timer of trials against the dense model, which it exports or builds once, and a builder of their engines."""

    def __init__(self, dense: Checkpoint, scratch: Path, speed: SweepSpeedChoice, *, keep_plans: bool = False) -> None:
        self.dense, self.scratch, self.speed = dense, scratch, speed
        self.keeps = keep_plans or speed.bench == "engine"
        engine = {"dense": model_digest(dense.model), "engine": (speed.engine, speed.sm, speed.batch)}
        here = fingerprint(environment()) if speed.bench is not None else ""
        self.engine_key = digest_of_values(**engine)
        self.speed_key = digest_of_values(**engine, speed=speed.values, machine=here)

    def engine_of(self, folder: TrialFolder) -> EngineBuilt | None:
        return folder.read(EngineBuilt, digest_of_values(trial=folder.key, by=self.engine_key))

    def timing_of(self, folder: TrialFolder) -> Timing | None:
        there = (folder.path / BENCH).is_file()
        return folder.read(Timing, digest_of_values(trial=folder.key, by=self.speed_key)) if there else None

    def wants_engine(self, folder: TrialFolder) -> bool:
        if self.speed.engine is None:
            return False
        timed = self.speed.bench == "engine" and self.wants_timing(folder)
        return self.engine_of(folder) is None or (timed and not (folder.path / PLAN_FILE).is_file())

    def wants_timing(self, folder: TrialFolder) -> bool:
        return self.speed.bench is not None and self.timing_of(folder) is None

    def build(self, folder: TrialFolder, reduced: Checkpoint) -> None:
        """Build a trial's engine and write its figures; keep its plan if engines are timed or kept."""
        graph, watch = folder.path / GRAPH_FILE, build_stopwatch("cpu")
        with watch.measure("build"):
            export_checkpoint(reduced, graph, precision=ENGINE_PRECISION)
            built = _engine(self.speed, graph)
        graph.unlink()
        record = built.record
        if self.keeps:
            write_engine(built, folder.path / PLAN_FILE)
        figures = EngineFigures(
            backend=record.backend,
            targets=record.targets,
            plan_bytes=record.plan_bytes,
            kernels=record.kernels,
            attention_sites=len(record.attention_sites),
            fused_attention=record.fused_attention,
        )
        key = digest_of_values(trial=folder.key, by=self.engine_key)
        folder.write(EngineBuilt(key=key, figures=figures, effort=watch.efforts["build"]))

    def time(self, folder: TrialFolder, *, command: Sequence[str] = ()) -> None:
        """Time the trial's model interleaved with the dense one, write samples and speeds, delete graph and plan."""
        speed, watch = self.speed, Stopwatch(host=None)  # the bench record has the memory of each model
        with watch.measure("bench"):
            measured = time_models(
                self._dense(),
                self._artefact(folder),
                batches=speed.batch,
                plan=Plan(time_limit_s=speed.time_limit, half_width_rel=speed.half_width),
                running=_running(speed),
                command=command,
            )
        save_bench(measured, folder.path / BENCH)
        summary = summarise(measured)
        folder.write(
            Timing(
                key=digest_of_values(trial=folder.key, by=self.speed_key),
                speeds=tuple(speed_from_row(row, summary.reference, summary.candidate) for row in summary.rows),
                size_bytes=measured.candidate.size_bytes,
                effort=watch.efforts["bench"],
            )
        )
        for name in (GRAPH_FILE, PLAN_FILE, f"{PLAN_FILE}.json"):
            (folder.path / name).unlink(missing_ok=True)

    def _artefact(self, folder: TrialFolder) -> Path:
        if self.speed.bench == "torch":
            return folder.model
        if self.speed.bench == "engine":
            return folder.path / PLAN_FILE
        reduced = folder.reduced()
        assert reduced is not None, folder.path
        export_checkpoint(reduced, folder.path / GRAPH_FILE, precision=self.speed.precision)
        return folder.path / GRAPH_FILE

    def _dense(self) -> Path:
        """Return the path of the dense model's directory, graph or engine, which is made if it is missing."""
        here = self.scratch / "dense"
        if self.speed.bench == "torch":
            if not here.is_dir():
                save(self.dense, here)
            return here
        here.mkdir(parents=True, exist_ok=True)
        graph, times_engines = here / GRAPH_FILE, self.speed.bench == "engine"
        if not graph.is_file():
            precision = ENGINE_PRECISION if times_engines else self.speed.precision
            export_checkpoint(self.dense, graph, precision=precision)
        plan = here / PLAN_FILE
        if times_engines and not plan.is_file():
            write_engine(_engine(self.speed, graph), plan)
        return plan if times_engines else graph
