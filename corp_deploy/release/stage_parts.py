"""What stages are made of: how one is run, and what its result depends on; and those of one target: its engines, what
proves them, and what times them. Imports no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corp_deploy import __version__
from corp_deploy.invocation.option import Invocation, Record
from corp_deploy.machine import versions
from perf.timing.watch import environment, watching

from . import calls, names
from .incremental import Stage, StageDirs
from .recipe import Recipe
from .recipe_keys import content_of
from .targets import ON_CPU, ReleaseTarget, missing_to_build, missing_to_run

TORCH = ("torch", "timm", "numpy")


def settings_of(name: str, table: Record, *, without: Sequence[str] = ()) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in content_of(table, Path()).items() if key not in without}


def step(name: str, *words: Any) -> Callable[[StageDirs], None]:
    def run(dirs: StageDirs) -> None:
        from . import release_steps, steps

        functions: dict[str, Callable[..., object]] = {
            "dense": release_steps.write_dense,
            "calibrate": steps.write_calibration,
            "reduce": steps.write_reduced,
            "size": steps.write_size,
            "export": steps.write_graphs,
            "samples": steps.write_samples,
            "verify": steps.write_parity,
            "engine": release_steps.write_engines,
            "target-parity": release_steps.write_target_parity,
            "bench": steps.write_bench,
            "gate": release_steps.write_verdicts,
            "package": steps.write_package,
            "report": release_steps.write_release_report,
            "manifest": release_steps.write_release_manifest,
        }
        functions[name](dirs, *words)

    return run


def stage(
    name: str,
    command: Invocation,
    run: Callable[[StageDirs], None] | None = None,
    *,
    outputs: Sequence[str],
    reads: Sequence[str] = (),
    outside: Mapping[str, Path | None] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[str] = (),
    missing: Callable[[], str | None] = lambda: None,
    machine: Callable[[], Mapping[str, Any]] | None = None,
    earlier: Callable[[], tuple[Mapping[str, Path], Mapping[str, Any]]] = lambda: ({}, {}),
) -> Stage:
    """What this command does, or `run` in its place; a file that may be `outside` is None where it isn't asked for.
    `tools`: the packages that its result depends on. A GPU's stages name none: that machine has others.
    """
    here = versions()
    return Stage(
        name=name,
        outputs=tuple(outputs),
        run=run or step(command.command, command),
        reads=tuple(dict.fromkeys(reads)),
        outside={label: path for label, path in outside.items() if path is not None},
        settings={
            **settings,
            "versions": {"corp-deploy": __version__} | {each: here[each] for each in tools if each in here},
        },
        missing=missing,
        machine=machine,
        earlier=earlier,
        command=str(command),
    )


def heads_read(recipe: Recipe) -> dict[str, Path]:
    of_metrics = {f"parity.metric_files.{place}": path for place, path in enumerate(recipe.parity.metric_files)}
    return {f"parity.head.{place}": path for place, path in enumerate(map(Path, recipe.parity.heads))} | of_metrics


# What times a target on the CPU; a GPU's machine has versions of its own.
TIMED_BY = {"onnxruntime-cpu": ("onnxruntime",), "openvino": ("openvino",)}
OF_MACHINE = ("machine", "cpu", "cpu_count", "gpu", "driver")
RUNTIMES = {
    "onnxruntime-cuda": ("onnxruntime_gpu",),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx",),
}


def _with_records(plans: Sequence[str], target: ReleaseTarget) -> tuple[str, ...]:
    return (*plans, *(f"{plan}.json" for plan in plans if target.is_engine))


def _engine_stage(recipe: Recipe, target: ReleaseTarget, graphs: Sequence[str]) -> Stage:
    plans, reads = [names.plan_name(target, subject) for subject in names.SUBJECTS], [*graphs]
    if target.rest is not None:
        plans.append(names.rival_name(target))
        reads.append(f"reduced/{names.graph_name(target.rest)}")
    command = calls.only_call(f"engine.{target.name}", recipe)
    return stage(
        f"engine.{target.name}",
        command,
        step("engine", target, command),
        outputs=_with_records(plans, target),
        reads=reads,
        settings={"precision": target.precision, "batch": str(target.profile), "sms": target.sms}
        | ({"sparse": True} if target.sparse else {}),
        missing=lambda: missing_to_build(target),
    )


def _target_parity_stage(recipe: Recipe, target: ReleaseTarget, reads: Sequence[str]) -> Stage:
    name, record = f"{names.PARITY_OF_TARGET}{target.name}", names.parity_name(target)
    labels = (names.SAMPLE_LABELS,) if names.has_sample_labels(recipe) else ()
    named = (names.SAMPLES_RECORD, *labels) if recipe.parity.metric else ()
    return stage(
        name,
        calls.only_call(name, recipe),
        step("target-parity", recipe, target),
        outputs=(record, names.outputs_name(record)),
        reads=(*names.BOTH_MODELS, *reads, *named),
        outside=heads_read(recipe),
        settings=settings_of("parity", recipe.parity, without=("head", "metric_files")),
        missing=lambda: missing_to_run(target),
    )


def measured_by(target: ReleaseTarget) -> dict[str, Any]:
    """Return the facts of this machine that decide a target's times."""
    with nullcontext((None, None)) if target.name in ON_CPU else watching() as (_, gpu):
        here = environment(gpu)
    return {key: here[key] for key in (*OF_MACHINE, *RUNTIMES.get(target.name, ())) if here[key] is not None}


def _timing_stage(
    name: str, recipe: Recipe, target: ReleaseTarget, call: Invocation, reads: Sequence[str], **compared: Any
) -> Stage:
    return stage(
        f"{name}.{target.name}",
        call,
        outputs=(call["output"],),
        reads=(*reads, names.SAMPLES),
        settings=settings_of("bench", recipe.bench) | compared,
        tools=TIMED_BY.get(target.name, ()) if name == "bench" else (),
        missing=lambda: missing_to_run(target),
        machine=lambda: measured_by(target),
    )


def target_stages(recipe: Recipe, target: ReleaseTarget) -> Iterator[Stage]:
    graphs = tuple(f"{subject}/{names.graph_name(target.precision)}" for subject in names.SUBJECTS)
    reads = (*graphs, *_with_records([names.artefact_name(target, subject) for subject in names.SUBJECTS], target))
    if target.is_engine:
        yield _engine_stage(recipe, target, graphs)
    if target.name != "onnxruntime-cpu":
        yield _target_parity_stage(recipe, target, (*reads, names.SAMPLES))
    yield _timing_stage("bench", recipe, target, calls.bench_call(recipe, target), reads, precision=target.precision)
    if target.rest is not None:  # the quantised model against the precision that it rests on, which it has to beat
        sides = _with_records([names.rival_name(target), names.artefact_name(target, "reduced")], target)
        yield _timing_stage("gain", recipe, target, calls.gain_call(recipe, target), sides, rest=target.rest)
