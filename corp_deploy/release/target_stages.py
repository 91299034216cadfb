"""The stages of one target: its engines, what proves them, and what times them. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from corp_deploy.invocation.call import Invocation

from . import calls, names
from .incremental import Stage
from .recipe import Recipe, Target
from .stage_parts import command_step, heads_read, own_step, settings_of, tool
from .targets import missing_to_build, missing_to_run

# What times a target on the CPU; a GPU's machine has versions of its own.
TIMED_BY = {"onnxruntime-cpu": ("onnxruntime",), "openvino": ("openvino",)}


def _engine_stage(recipe: Recipe, target: Target) -> Stage:
    plans = tuple(names.plan_name(target, subject) for subject in names.SUBJECTS)
    rivals = () if target.rest is None else (names.rival_name(target),)
    graphs = [f"{subject}/{names.graph_name(target.precision)}" for subject in names.SUBJECTS]
    command = calls.only(f"engine.{target.name}", recipe)
    return Stage(
        name=f"engine.{target.name}",
        outputs=(*plans, *rivals, *(f"{plan}.json" for plan in (*plans, *rivals))),
        run=own_step("engine", target, command),
        reads=(*graphs, *([] if target.rest is None else [f"reduced/{names.graph_name(target.rest)}"])),
        settings={"precision": target.precision, "batch": str(target.profile), "sms": target.sms, "versions": tool()}
        | ({"sparse": True} if target.sparse else {}),
        missing=lambda: missing_to_build(target),
        command=str(command),
    )


def _target_parity_stage(recipe: Recipe, target: Target, reads: tuple[str, ...]) -> Stage:
    name = f"{names.PARITY_OF_TARGET}{target.name}"
    labels = (names.SAMPLE_LABELS,) if names.has_sample_labels(recipe) else ()
    named = (names.SAMPLES_RECORD, *labels) if recipe.parity.metric else ()
    return Stage(
        name=name,
        outputs=(names.parity_name(target), names.outputs_name(names.parity_name(target))),
        run=own_step("target-parity", recipe, target),
        reads=tuple(dict.fromkeys((*names.MODELS["dense"], *names.MODELS["reduced"], *reads, *named))),
        outside=heads_read(recipe),
        settings=settings_of("parity", recipe.parity, without=("head", "metric_files")) | {"versions": tool()},
        missing=lambda: missing_to_run(target),
        command=str(calls.only(name, recipe)),
    )


def _timing_stage(
    name: str, recipe: Recipe, target: Target, call: Invocation, reads: tuple[str, ...], **settings: Any
) -> Stage:
    return Stage(
        name=f"{name}.{target.name}",
        outputs=(call["output"],),
        run=command_step(call),
        reads=reads,
        settings=settings_of("bench", recipe.bench) | settings,
        missing=lambda: missing_to_run(target),
        command=str(call),
    )


def target_stages(recipe: Recipe, target: Target) -> Iterator[Stage]:
    artefacts = tuple(names.artefact_name(target, subject) for subject in names.SUBJECTS)
    records = tuple(f"{name}.json" for name in artefacts) if target.is_engine else ()
    graphs = tuple(f"{subject}/{names.graph_name(target.precision)}" for subject in names.SUBJECTS)
    reads = tuple(dict.fromkeys((*graphs, *artefacts, *records, names.SAMPLES)))
    local = target.name == "onnxruntime-cpu"
    if target.is_engine:
        yield _engine_stage(recipe, target)
    if not local:
        yield _target_parity_stage(recipe, target, reads)
    tools = tool(*TIMED_BY.get(target.name, ()))
    yield _timing_stage(
        "bench", recipe, target, calls.bench(recipe, target), reads, precision=target.precision, versions=tools
    )
    if target.rest is not None:  # the quantised model against the precision that it rests on, which it has to beat
        sides = names.rival_name(target), names.artefact_name(target, "reduced")
        of_plans = tuple(f"{name}.json" for name in sides) if target.is_engine else ()
        read = (*sides, *of_plans, names.SAMPLES)
        yield _timing_stage("gain", recipe, target, calls.gain(recipe, target), read, rest=target.rest, versions=tool())
