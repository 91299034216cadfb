"""All stages of a release: its models, the artefacts of its targets, the gate and the reports. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corp_deploy.invocation.option import Invocation, path_from
from corp_deploy.invocation.running import PlanOptions
from corp_deploy.machine import versions
from ground.files import write_text
from perf.stats.releases import release_of_file

from . import names
from .baseline import Baseline
from .incremental import Stage
from .model_stages import (
    dense_stage,
    export_stage,
    moments_stage,
    parity_paths,
    parity_settings,
    parity_stage,
    reduce_stage,
    samples_stage,
    size_stage,
)
from .pace import timed
from .recipe import Recipe
from .recipe_toml import text_of_recipe
from .stage import baseline_options, release_call, settings_of, stage, stage_call, step
from .targets import ReleaseTarget, machine_facts, missing_to_build, missing_to_run, run_options

TIMED_BY = {"onnxruntime-cpu": ("onnxruntime",), "openvino": ("openvino",)}
"""The packages whose versions decide the times of targets on the CPU; a GPU's machine has versions of its own."""
BASELINES = {"bench": "baseline", "parity": "baseline_parity"}


def _with_records(plans: Sequence[str], target: ReleaseTarget) -> tuple[str, ...]:
    return (*plans, *(f"{plan}.json" for plan in plans if target.is_engine))


def _engine_stage(recipe: Recipe, target: ReleaseTarget, graphs: Sequence[str]) -> Stage:
    plans, reads = [names.plan_name(target, subject) for subject in names.SUBJECTS], [*graphs]
    if target.rest is not None:
        plans.append(names.rival_name(target))
        reads.append(f"reduced/{names.graph_name(target.rest)}")
    command = stage_call(f"engine.{target.name}", recipe)
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
        stage_call(name, recipe),
        step("target-parity", recipe, target),
        outputs=(record, names.outputs_name(record)),
        reads=(*names.BOTH_MODELS, *reads, names.SAMPLES, *named),
        outside=parity_paths(recipe),
        settings=parity_settings(recipe),
        missing=lambda: missing_to_run(target),
    )


def _timing_stage(
    kind: str,
    recipe: Recipe,
    target: ReleaseTarget,
    sides: tuple[str, str],
    output: str,
    *,
    reads: Sequence[str],
    compared: Mapping[str, str | None],
    titles: tuple[str | None, str] | None = None,
) -> Stage:
    """Return the stage that times the two files `sides`; `titles` are their names in its record (None: the default)."""
    command = Invocation(
        command="bench",
        arguments=sides,
        options={
            **run_options(target, recipe.bench.threads),
            **recipe.model.trust,
            "names": titles,
            "batch": recipe.bench.batches,
            "images": names.SAMPLES,
            **PlanOptions.from_options(recipe.bench.values).command_options,
            "output": output,
        },
    )
    return stage(
        f"{kind}.{target.name}",
        command,
        outputs=(output,),
        reads=(*reads, names.SAMPLES),
        settings={**settings_of("bench", recipe.bench), **compared},
        tools=TIMED_BY.get(target.name, ()) if kind == "bench" else (),
        missing=lambda: missing_to_run(target),
        machine=lambda: machine_facts(target),
    )


def _target_stages(recipe: Recipe, target: ReleaseTarget) -> Iterator[Stage]:
    dense, reduced = (names.artefact_name(target, subject) for subject in names.SUBJECTS)
    graphs = tuple(f"{subject}/{names.graph_name(target.precision)}" for subject in names.SUBJECTS)
    reads = (*graphs, *_with_records((dense, reduced), target))
    if target.is_engine:
        yield _engine_stage(recipe, target, graphs)
    if target.name != "onnxruntime-cpu":
        yield _target_parity_stage(recipe, target, reads)
    output, compared = names.bench_name(recipe, target), {"precision": target.precision}
    yield _timing_stage("bench", recipe, target, (dense, reduced), output, reads=reads, compared=compared)
    if target.rest is not None:  # a quantised model has to be faster than the precision that it rests on
        sides = names.rival_name(target), reduced
        yield _timing_stage(
            "gain",
            recipe,
            target,
            sides,
            names.gain_name(target),
            reads=_with_records(sides, target),
            compared={"rest": target.rest},
            titles=(target.rest, target.precision),
        )


def _bench_names(recipe: Recipe) -> tuple[str, ...]:
    return tuple(names.bench_name(recipe, target) for target in recipe.targets)


def _measured(recipe: Recipe) -> tuple[str, ...]:
    gains = (names.gain_name(target) for target in recipe.targets if target.rest is not None)
    return (*_bench_names(recipe), *gains, *names.parities_of(recipe))


def _gate_command(recipe: Recipe, root: Path, baseline: Baseline) -> Invocation:
    """Return the command `gate` if it judges the same records by the same rules, else `release --only gate`."""
    first, *others = recipe.targets
    if others or first.rules or first.rest or names.parity_name(first) != names.PARITY:
        return release_call(recipe, baseline, root, "gate")
    return Invocation(
        command="gate",
        arguments=(names.bench_name(recipe, first), names.PARITY),
        options={
            "fail_if": list(recipe.gate.rules),
            **({"confidence": recipe.gate.confidence} if recipe.gate.rules else {}),
            **baseline_options(baseline, root),
            "history": path_from(root, recipe.gate.history),
            "output": [names.GATE],
        },
    )


def _earlier_releases(history: Path, bench: Path) -> list[str]:
    """Return the names of a history's records older than `bench`; newer ones don't change its verdict."""
    if not bench.is_file() or not history.is_dir():
        return []
    own = f"{release_of_file(bench).name}.json"
    return sorted(path.name for path in history.iterdir() if not path.name.startswith(".") and path.name < own)


def _gate_stage(recipe: Recipe, root: Path, baseline: Baseline) -> Stage:
    def earlier() -> tuple[Mapping[str, Path], Mapping[str, Any]]:
        """Return the baseline's records, and the older releases of the history, once the bench record is written."""
        older, history = baseline.older(names.own_records(recipe, root)), recipe.gate.history
        bench = root / _bench_names(recipe)[0]
        known = {} if history is None else {"gate.history": _earlier_releases(history, bench)}
        return {label: older[kind] for kind, label in BASELINES.items() if kind in older}, known

    rules = settings_of("gate", recipe.gate, without=("history",))
    rules |= {f"targets.{target.name}.fail_if": [rule.text for rule in target.rules] for target in recipe.targets}
    return stage(
        "gate",
        _gate_command(recipe, root, baseline),
        step("gate", recipe, baseline),
        outputs=(names.GATE, *(names.HISTORY if recipe.gate.history else ())),
        reads=_measured(recipe),
        settings={**rules, "targets": [target.name for target in recipe.targets]},
        earlier=earlier,
    )


def _package_stage(recipe: Recipe, root: Path) -> Stage:
    plans = [names.artefact_name(target, "reduced") for target in recipe.targets if target.is_engine]
    records = (*(f"{plan}.json" for plan in plans), *_bench_names(recipe), *names.parities_of(recipe), names.GATE)
    options = {
        "name": recipe.package.name,
        "model_version": 1,
        "labels": path_from(root, recipe.package.labels),
        "allow_failed": recipe.package.allow_failed,
        "cpu_backend": "openvino" if recipe.served_on_cpu == "openvino" else None,
        "output": names.REPOSITORY,
    }
    return stage(
        "package",
        Invocation(command="package", arguments=(".",), options=options),
        outputs=(f"{names.REPOSITORY}/",),
        reads=(names.MODELS["reduced"][0], *names.graphs_of(recipe, "reduced"), *plans, *records),
        outside={"package.labels": recipe.package.labels},
        settings={key: options[key] for key in ("name", "cpu_backend", "allow_failed")},
    )


def _report_stage(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Stage:
    commands, stage_names = [each.command for each in before], [each.name for each in before]
    optional = (
        *(names.HISTORY if recipe.gate.history else ()),
        *((names.SIZE,) if recipe.calibration.snapshots else ()),
    )
    return stage(
        "report",
        release_call(recipe, baseline, root, "report"),
        step("report", recipe, commands, stage_names),
        outputs=(*names.REPORTS, names.CARD, *(names.page_name(target) for target in recipe.targets[1:])),
        reads=(names.RECIPE, names.MODELS["reduced"][0], names.SUMMARY, *_measured(recipe), names.GATE, *optional),
        settings={"commands": commands},
    )


def _manifest_stage(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Stage:
    command, own = (str(release_call(recipe, baseline, root, *only)) for only in ((), ("manifest",)))
    return Stage(
        name="manifest",
        outputs=(names.BILL, names.MANIFEST, names.PROVENANCE, names.SUMS),
        run=step("manifest", recipe, before, command, own),
        reads=tuple(name for each in before for name in each.outputs if not name.startswith(".")),
        settings={"versions": versions(), "commands": [command, *(each.command for each in before)]},
    )


def stages_of(recipe: Recipe, root: Path, baseline: Baseline) -> list[Stage]:
    """Return all stages of a release, each after the stages whose files it reads."""
    text = text_of_recipe(recipe, root)
    recipe_stage = Stage(
        name="recipe",
        outputs=(names.RECIPE,),
        run=lambda dirs: write_text(dirs.into / names.RECIPE, text),
        settings={"recipe": text},
        command=str(stage_call("recipe", recipe)),
    )
    stages = [
        recipe_stage,
        dense_stage(recipe),
        moments_stage(recipe, root),
        reduce_stage(recipe, root),
        *([size_stage(recipe)] if recipe.calibration.snapshots else []),
        *(export_stage(recipe, root, subject) for subject in names.SUBJECTS),
        samples_stage(recipe),
        parity_stage(recipe, root),
        *(each for target in recipe.targets for each in _target_stages(recipe, target)),
        _gate_stage(recipe, root, baseline),
        *([] if recipe.package.name is None else [_package_stage(recipe, root)]),
    ]
    # Torch uses the GPU in the stage `moments` only, and can't measure the memory of engine builders.
    stages = [timed(each, recipe.calibration.device if each.name == "moments" else "cpu") for each in stages]
    stages.append(_report_stage(recipe, root, tuple(stages), baseline))
    stages.append(_manifest_stage(recipe, root, tuple(stages), baseline))
    return stages
