"""How fast the trials of a sweep are beside the dense model, and what engines of them are like."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from corp_deploy.invocation.running import RunOptions
from corp_deploy.invocation.sweep_speed import EngineBackend, Runtime, SweepSpeedChoice
from corp_deploy.proof.speed import measure
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.inputs import model_digest
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.build import build_engine, write_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.effort import Stopwatch
from ground.errors import BadInput
from perf.record.runs import save_bench
from perf.runners.memory import stopwatch
from perf.stats.summary import summarise
from perf.timing.environment import environment, fingerprint
from perf.timing.laps import Plan

from .sweep_points import EngineFigures, speed_of_row
from .sweep_trials import BENCH, EngineBuilt, Timing, TrialFolder, key_of

PLAN_FILE, GRAPH_FILE = "engine.plan", "model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTarget:
    """What engines are built for: every batch that is measured, in one profile."""

    backend: EngineBackend
    sms: tuple[str, ...] = ()
    precision: str = "fp16"
    batches: tuple[int, ...] = (1,)

    def options(self) -> BuildOptions:
        profile = BatchProfile(smallest=min(self.batches), tuned=max(self.batches), largest=max(self.batches))
        return BuildOptions(backend=self.backend, precision=self.precision, profiles=(profile,), sms=self.sms)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTarget:
    """What trials are timed in, and how."""

    runtime: Runtime
    batches: tuple[int, ...]
    plan: Plan = field(default_factory=lambda: Plan(time_limit_s=5.0, half_width_rel=0.02))
    precision: str = "fp32"
    threads: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def running(self) -> RunOptions:
        """As `bench` is told of it."""
        on_gpu = self.device == "cuda"
        match self.runtime:
            case "torch":
                dtype = None if self.precision == "fp32" else self.precision
                return RunOptions(backend="torch", device=self.device, dtype=dtype, threads=self.threads)  # type: ignore[arg-type]
            case "openvino":
                return RunOptions(backend="openvino", threads=self.threads)
            case "onnxruntime":
                return RunOptions(provider="cuda" if on_gpu else None, threads=self.threads)
        return RunOptions()


def speed_from_choice(choice: SweepSpeedChoice) -> SpeedTarget | None:
    """What trials are timed in as it is asked for; None for nothing."""
    if choice.bench is None:
        return None
    return SpeedTarget(
        runtime=choice.bench,
        batches=choice.batch,
        plan=Plan(time_limit_s=choice.time_limit, half_width_rel=choice.half_width),
        precision=choice.precision,
        threads=choice.threads,
        device="cuda" if choice.bench == "engine" else choice.device,
    )


def engine_from_choice(choice: SweepSpeedChoice) -> EngineTarget | None:
    """What engines are built for, in FP16; None for nothing."""
    return None if choice.engine is None else EngineTarget(backend=choice.engine, sms=choice.sm, batches=choice.batch)


class Bench:
    """Times trials one by one against the dense model, whose graph or engine is made once, in `scratch`."""

    def __init__(
        self,
        dense: Checkpoint,
        scratch: Path,
        speed: SpeedTarget | None,
        engine: EngineTarget | None,
        *,
        keep_plans: bool = False,
    ) -> None:
        if speed is not None and speed.runtime == "engine" and engine is None:
            raise BadInput("engines are timed, and nothing says what builds them; give --engine tensorrt-rtx")
        self.dense, self.scratch, self.speed, self.engine = dense, scratch, speed, engine
        self.keeps = keep_plans or (speed is not None and speed.runtime == "engine")
        digest = model_digest(dense.model)
        asked_engine = None if engine is None else asdict(engine)
        self.engine_key = key_of(dense=digest, engine=asked_engine)
        here = fingerprint(environment()) if speed is not None else ""
        self.speed_key = key_of(
            dense=digest, speed=None if speed is None else asdict(speed), machine=here, engine=asked_engine
        )

    def keys_of(self, folder: TrialFolder) -> tuple[str, str]:
        """Of the trial's engine and of its timing."""
        return key_of(trial=folder.key, by=self.engine_key), key_of(trial=folder.key, by=self.speed_key)

    def wants_engine(self, folder: TrialFolder) -> bool:
        if self.engine is None:
            return False
        timed = self.speed is not None and self.speed.runtime == "engine" and self.wants_timing(folder)
        return folder.engine(self.keys_of(folder)[0]) is None or (timed and not (folder.path / PLAN_FILE).is_file())

    def wants_timing(self, folder: TrialFolder) -> bool:
        return self.speed is not None and folder.timing(self.keys_of(folder)[1]) is None

    def build(self, folder: TrialFolder, reduced: Checkpoint) -> None:
        """The engine of a trial, its figures written, its plan kept where it is to be timed."""
        assert self.engine is not None
        graph, watch = folder.path / GRAPH_FILE, stopwatch("cpu")
        with watch.measure("build"):
            export_checkpoint(reduced, graph, precision=self.engine.precision)
            built = build_engine(graph, self.engine.options())
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
        key = self.keys_of(folder)[0]
        folder.write_engine(EngineBuilt(key=key, figures=figures, effort=watch.efforts["build"]))

    def time(self, folder: TrialFolder, *, command: Sequence[str] = ()) -> None:
        """Dense against the trial's reduced model, interleaved; the raw samples stay beside it."""
        speed = self.speed
        assert speed is not None
        watch = Stopwatch(host=None)  # who is timed has his own memory told
        with watch.measure("bench"):
            measured = measure(
                self._dense(),
                self._artefact(folder),
                batches=speed.batches,
                plan=speed.plan,
                running=speed.running,
                command=command,
            )
        save_bench(measured, folder.path / BENCH)
        summary = summarise(measured)
        folder.write_timing(
            Timing(
                key=self.keys_of(folder)[1],
                speeds=tuple(speed_of_row(row, summary.reference, summary.candidate) for row in summary.rows),
                size_bytes=measured.candidate.size_bytes,
                fused_attention=measured.candidate.fused_attention,
                effort=watch.efforts["bench"],
            )
        )
        for name in (GRAPH_FILE, PLAN_FILE, f"{PLAN_FILE}.json"):
            (folder.path / name).unlink(missing_ok=True)

    def _artefact(self, folder: TrialFolder) -> Path:
        assert self.speed is not None
        if self.speed.runtime == "torch":
            return folder.model
        if self.speed.runtime == "engine":
            return folder.path / PLAN_FILE
        reduced = folder.reduced()
        assert reduced is not None, folder.path
        export_checkpoint(reduced, folder.path / GRAPH_FILE, precision=self.speed.precision)
        return folder.path / GRAPH_FILE

    def _dense(self) -> Path:
        """The dense model as it is timed, made where it is not there yet."""
        assert self.speed is not None
        here = self.scratch / "dense"
        if self.speed.runtime == "torch":
            if not here.is_dir():
                save(self.dense, here)
            return here
        here.mkdir(parents=True, exist_ok=True)
        graph = here / GRAPH_FILE
        engine = self.engine if self.speed.runtime == "engine" else None
        if not graph.is_file():
            export_checkpoint(self.dense, graph, precision=self.speed.precision if engine is None else engine.precision)
        if engine is None:
            return graph
        plan = here / PLAN_FILE
        if not plan.is_file():
            write_engine(build_engine(graph, engine.options()), plan)
        return plan


def is_leader() -> bool:
    """Whether this process is the first of its machine: only one of a machine times, or they would time each other."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def this_machine() -> int:
    """The number of this process's machine among those of torchrun."""
    return int(os.environ.get("GROUP_RANK", "0"))
