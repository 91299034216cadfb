"""The stages of a release: the command, inputs and outputs of each stage. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.option import Invocation, Pairs, path_from
from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.invocation.running import PlanOptions
from corp_deploy.machine import versions
from corp_deploy.spec.class_labels import labels_file
from ground.files import write_text
from ground.gpu import missing_gpu
from perf.stats.trend import release_of_file

from . import names
from .baseline import Baseline
from .incremental import Stage
from .pace import timed
from .recipe import Recipe
from .recipe_toml import text_of_recipe
from .stage import baseline_options, release_call, settings_of, stage, stage_call, step
from .targets import ReleaseTarget, machine_facts, missing_to_build, missing_to_run, run_options

SAVE_EVERY_IMAGES = 1024
TORCH = ("torch", "timm", "numpy")
TIMED_BY = {"onnxruntime-cpu": ("onnxruntime",), "openvino": ("openvino",)}
"""The packages that time a target on the CPU; a GPU's machine has versions of its own."""
BASELINES = {"bench": "baseline", "parity": "baseline_parity"}


def _calibration_paths(recipe: Recipe, *, grouped: bool = True) -> dict[str, Path | None]:
    table = recipe.calibration
    return {"calibration.images": table.images, "calibration.group_labels": table.group_labels if grouped else None}


def _calibration_values(recipe: Recipe, *keys: str, prefix: str = "calibration.") -> dict[str, Any]:
    return {f"{prefix}{key}": getattr(recipe.calibration, key) for key in keys}


def _groups(recipe: Recipe, root: Path) -> str | None:
    return path_from(root, recipe.calibration.group_labels) or recipe.calibration.groups


def _held_out_moments(recipe: Recipe) -> tuple[str, ...]:
    return () if recipe.calibration.hold_out is None else (names.HELD_OUT_MOMENTS,)


def _proof_paths(recipe: Recipe) -> dict[str, Path | None]:
    return _calibration_paths(recipe) if recipe.proves_on_calibration else {"held_out.images": recipe.held_out.images}


def _proof_keys(recipe: Recipe) -> dict[str, Any]:
    if recipe.proves_on_calibration:
        return _calibration_values(recipe, "samples", "seed", "hold_out", "groups")
    return {"held_out.samples": recipe.held_out.samples, "held_out.seed": recipe.held_out.seed}


def _labels_file(recipe: Recipe) -> Path | None:
    labels = recipe.held_out.labels
    return None if labels is None else labels_file(labels)


def _reduce_settings(recipe: Recipe) -> dict[str, Any]:
    return settings_of("reduce", recipe.reduce, without=("latency_tables",))  # the machine's own


def _parity_settings(recipe: Recipe) -> dict[str, Any]:
    return settings_of("parity", recipe.parity, without=("head", "metric_files"))


def _parity_paths(recipe: Recipe) -> dict[str, Path]:
    heads, files = map(Path, recipe.parity.heads), recipe.parity.metric_files
    return {f"parity.head.{place}": path for place, path in enumerate(heads)} | {
        f"parity.metric_files.{place}": path for place, path in enumerate(files)
    }


def _dense_stage(recipe: Recipe) -> Stage:
    model, settings = recipe.model, settings_of("model", recipe.model, without=("model", "weights"))
    if model.directory is None:  # the file of a user's code is among the paths, so only its function counts here
        settings["model.model"] = model.name if model.code is None else model.name.rpartition(":")[2]
    return stage(
        "dense",
        stage_call("dense", recipe),
        step("dense", recipe),
        outputs=names.MODELS["dense"],
        outside={
            "model": model.directory or model.code,
            "weights": None if model.weights is None else Path(model.weights),
        },
        settings=settings,
        tools=TORCH,
    )


def _moments_stage(recipe: Recipe, root: Path) -> Stage:
    calibration, reduction = recipe.calibration, recipe.reduce
    restricted, on_gpu = calibration.attention_system == "kept", calibration.device == "cuda"
    statistics = {
        "attention_system": reduction.method_asked.needs_attention_system,
        "residual": bool(reduction.residual),
        "active_eps": calibration.active_eps,
        "snapshots": calibration.snapshots or None,
        "attn": (reduction.attn,) if restricted else None,
        "align": Pairs(head=reduction.align.get("head")) if restricted else None,
    }
    merged = reduction.of_statistics.command_options
    command = Invocation(
        command="calibrate",
        options={
            "model": "dense",
            **recipe.model.trust,
            "images": path_from(root, calibration.images),
            **_calibration_values(recipe, "samples", "seed", "batch_size", "device", "workers", "max_bad", prefix=""),
            **statistics,
            **merged,
            "hold_out": calibration.hold_out,
            "groups": _groups(recipe, root),
            "checkpoint_every": SAVE_EVERY_IMAGES,
            "summary": names.SUMMARY,
            "output": names.MOMENTS,
        },
    )
    otherwise_said = ("images", "workers", "attention_system", "group_labels", "active_eps", "snapshots")
    return stage(
        "moments",
        command,
        outputs=(names.MOMENTS, names.SUMMARY, *names.snapshots_of(recipe), *_held_out_moments(recipe)),
        reads=names.MODELS["dense"],
        outside=_calibration_paths(recipe),
        settings=settings_of("calibration", calibration, without=otherwise_said)
        | {key: value for key, value in statistics.items() if value is not None}
        | {f"reduce.{name}": value for name, value in merged.items()},
        tools=() if on_gpu else TORCH,
        missing=missing_gpu if on_gpu else lambda: None,
    )


def _reduce_stage(recipe: Recipe, root: Path) -> Stage:
    choice, calibration, proves_on_calibration = recipe.reduce, recipe.calibration, recipe.proves_on_calibration
    options = {
        "model": "dense",
        **recipe.model.trust,
        "moments": names.MOMENTS,
        "held_out": names.HELD_OUT_MOMENTS if recipe.judges_sites else None,
        **choice.command_options,
        "latency_tables": path_from(root, choice.latency_tables),
        "images": path_from(root, calibration.images),
        **_calibration_values(recipe, "samples", "seed", "workers", "max_bad", prefix=""),
        # The reduction doesn't see the images that prove its result.
        "hold_out": calibration.hold_out if proves_on_calibration else None,
        "groups": _groups(recipe, root) if proves_on_calibration else None,
        "output": "reduced",
    }
    for axis, way in choice.ways:  # reduce refuses options that these ways ignore
        options = axis.supported(way, options)
    command, looks = Invocation(command="reduce", options=options), "images" in options
    seen = ("samples", "seed", "max_bad", *(("hold_out", "groups") if proves_on_calibration else ()))
    return stage(
        "reduce",
        command,
        step("reduce", command, choice),
        outputs=(*names.MODELS["reduced"], *([names.SAVED_AS_HF] if choice.save_as else [])),
        reads=(*names.MODELS["dense"], names.MOMENTS, *_held_out_moments(recipe)),
        outside=_calibration_paths(recipe, grouped=proves_on_calibration) if looks else {},
        settings=_reduce_settings(recipe) | (_calibration_values(recipe, *seen) if looks else {}),
        tools=TORCH,
    )


def _size_stage(recipe: Recipe) -> Stage:
    moments = (*names.snapshots_of(recipe), names.MOMENTS, *_held_out_moments(recipe))
    return stage(
        "size",
        stage_call("size", recipe),
        step("size", recipe),
        outputs=(names.SIZE,),
        reads=(*names.BOTH_MODELS, *moments),
        outside=_proof_paths(recipe) | {"calibration.images": recipe.calibration.images},
        settings=_reduce_settings(recipe) | _proof_keys(recipe),
        tools=TORCH,
    )


def _export_stage(recipe: Recipe, root: Path, subject: str) -> Stage:
    export, calibration, ranges = recipe.export, recipe.calibration, dict[str, Any]()
    if export.quantised:  # the ranges of INT8 and FP8 are computed from calibration images
        ranges = {"samples": recipe.range_samples, "seed": calibration.seed}
    images = calibration.images if ranges else None
    graph = names.graph_name(export.precisions[0] if len(export.precisions) == 1 else "fp32")
    command = Invocation(
        command="export",
        options={
            "model": subject,
            **recipe.model.trust,
            **ExportOptions.from_options(export.values).command_options,
            "images": path_from(root, images),
            **ranges,
            "output": f"{subject}/{graph}",
        },
    )
    return stage(
        f"export.{subject}",
        command,
        step("export", command, export),
        outputs=names.graphs_of(recipe, subject),
        reads=names.MODELS[subject],
        outside={"calibration.images": images},
        settings=settings_of("export", export) | {f"ranges.{name}": value for name, value in ranges.items()},
        tools=(*TORCH, "onnx", "onnxscript"),
    )


def _samples_stage(recipe: Recipe) -> Stage:
    answers = (names.answers_name(subject, each) for subject in names.SUBJECTS for each in recipe.export.precisions)
    labelled = names.has_sample_labels(recipe)
    return stage(
        "samples",
        stage_call("samples", recipe),
        step("samples", recipe),
        outputs=(names.SAMPLES, names.SAMPLES_RECORD, *((names.SAMPLE_LABELS,) if labelled else ()), *answers),
        reads=(*names.MODELS["dense"], *names.graphs_of(recipe, "dense"), *names.graphs_of(recipe, "reduced")),
        outside=_proof_paths(recipe) | {"held_out.labels": _labels_file(recipe) if labelled else None},
        settings=_proof_keys(recipe)
        | ({"samples.named": True} if recipe.parity.metric else {})
        | {"samples.count": recipe.samples.count},
        tools=(*TORCH, "onnxruntime"),
    )


def _parity_stage(recipe: Recipe, root: Path) -> Stage:
    proving, parity, graphs = recipe.proof_images, recipe.parity, names.graphs_of(recipe, "reduced")
    command = Invocation(
        command="verify",
        arguments=(*names.SUBJECTS, *graphs),
        options={
            **recipe.model.trust,
            "images": path_from(root, proving.images),
            "labels": path_from(root, recipe.held_out.labels),
            **proving.drawn,
            "hold_out": proving.hold_out,
            "groups": _groups(recipe, root) if recipe.proves_on_calibration else None,
            "moments": names.MOMENTS,
            **ProofOptions.from_options(parity.values).command_options,
            "head": [path_from(root, path) for path in parity.heads],
            "metric": parity.metrics(root),
            "output": names.PARITY,
        },
    )
    return stage(
        "parity",
        command,
        outputs=(names.PARITY, names.outputs_name(names.PARITY)),
        reads=(*names.BOTH_MODELS, names.MOMENTS, *graphs),
        outside=_proof_paths(recipe) | _parity_paths(recipe) | {"held_out.labels": _labels_file(recipe)},
        settings=_parity_settings(recipe) | _proof_keys(recipe),
        tools=(*TORCH, "onnxruntime"),
    )


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
        outside=_parity_paths(recipe),
        settings=_parity_settings(recipe),
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
    """Return the stage that times two artefacts; `titles` are their names in its record, dense and reduced if None."""
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
    """Return the command `gate` if the release has one bench and one parity record, else `release --only gate`."""
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
        _dense_stage(recipe),
        _moments_stage(recipe, root),
        _reduce_stage(recipe, root),
        *([_size_stage(recipe)] if recipe.calibration.snapshots else []),
        *(_export_stage(recipe, root, subject) for subject in names.SUBJECTS),
        _samples_stage(recipe),
        _parity_stage(recipe, root),
        *(each for target in recipe.targets for each in _target_stages(recipe, target)),
        _gate_stage(recipe, root, baseline),
        *([] if recipe.package.name is None else [_package_stage(recipe, root)]),
    ]
    # Torch uses the GPU in the stage `moments` only, and can't measure the memory of engine builders.
    stages = [timed(each, recipe.calibration.device if each.name == "moments" else "cpu") for each in stages]
    stages.append(_report_stage(recipe, root, tuple(stages), baseline))
    stages.append(_manifest_stage(recipe, root, tuple(stages), baseline))
    return stages
