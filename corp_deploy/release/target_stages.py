"""The stages of one target: its engines, what proves them, and what times them. Imports no torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from corp_deploy.invocation.option import Invocation

from . import calls, names
from .incremental import Stage
from .recipe import Recipe, Target
from .stage_parts import heads_read, settings_of, stage, step
from .targets import missing_to_build, missing_to_run

# What times a target on the CPU; a GPU's machine has versions of its own.
TIMED_BY = {"onnxruntime-cpu": ("onnxruntime",), "openvino": ("openvino",)}


def _with_records(plans: Sequence[str], target: Target) -> tuple[str, ...]:
    """What a target runs; engines stand beside their records."""
    return (*plans, *(f"{plan}.json" for plan in plans if target.is_engine))


def _engine_stage(recipe: Recipe, target: Target, graphs: Sequence[str]) -> Stage:
    plans, reads = [names.plan_name(target, subject) for subject in names.SUBJECTS], [*graphs]
    if target.rest is not None:
        plans.append(names.rival_name(target))
        reads.append(f"reduced/{names.graph_name(target.rest)}")
    command = calls.only(f"engine.{target.name}", recipe)
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


def _target_parity_stage(recipe: Recipe, target: Target, reads: Sequence[str]) -> Stage:
    name, record = f"{names.PARITY_OF_TARGET}{target.name}", names.parity_name(target)
    labels = (names.SAMPLE_LABELS,) if names.has_sample_labels(recipe) else ()
    named = (names.SAMPLES_RECORD, *labels) if recipe.parity.metric else ()
    return stage(
        name,
        calls.only(name, recipe),
        step("target-parity", recipe, target),
        outputs=(record, names.outputs_name(record)),
        reads=(*names.BOTH_MODELS, *reads, *named),
        outside=heads_read(recipe),
        settings=settings_of("parity", recipe.parity, without=("head", "metric_files")),
        missing=lambda: missing_to_run(target),
    )


def _timing_stage(
    name: str, recipe: Recipe, target: Target, call: Invocation, reads: Sequence[str], **compared: Any
) -> Stage:
    return stage(
        f"{name}.{target.name}",
        call,
        outputs=(call["output"],),
        reads=(*reads, names.SAMPLES),
        settings=settings_of("bench", recipe.bench) | compared,
        tools=TIMED_BY.get(target.name, ()) if name == "bench" else (),
        missing=lambda: missing_to_run(target),
    )


def target_stages(recipe: Recipe, target: Target) -> Iterator[Stage]:
    graphs = tuple(f"{subject}/{names.graph_name(target.precision)}" for subject in names.SUBJECTS)
    reads = (*graphs, *_with_records([names.artefact_name(target, subject) for subject in names.SUBJECTS], target))
    if target.is_engine:
        yield _engine_stage(recipe, target, graphs)
    if target.name != "onnxruntime-cpu":
        yield _target_parity_stage(recipe, target, (*reads, names.SAMPLES))
    yield _timing_stage("bench", recipe, target, calls.bench(recipe, target), reads, precision=target.precision)
    if target.rest is not None:  # the quantised model against the precision that it rests on, which it has to beat
        sides = _with_records([names.rival_name(target), names.artefact_name(target, "reduced")], target)
        yield _timing_stage("gain", recipe, target, calls.gain(recipe, target), sides, rest=target.rest)
