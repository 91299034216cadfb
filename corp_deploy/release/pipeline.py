"""The stages of a recipe, in an order in which each finds what it reads. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corp_deploy.machine import versions
from corp_deploy.spec.class_labels import labels_file
from ground.files import write_text
from ground.gpu import missing_gpu
from perf.stats.trend import release_of_file

from . import calls, names
from .baseline import Baseline
from .incremental import Stage
from .pace import timed
from .recipe import Recipe
from .recipe_toml import text_of_recipe
from .stage_parts import TORCH, heads_read, settings_of, stage, step, target_stages


def _dense_stage(recipe: Recipe) -> Stage:
    model, settings = recipe.model, settings_of("model", recipe.model, without=("model", "weights"))
    if model.directory is None:  # of a user's code the function, as the file is told of by its content
        settings["model.model"] = model.name if model.code is None else model.name.rpartition(":")[2]
    return stage(
        "dense",
        calls.only_call("dense", recipe),
        step("dense", recipe),
        outputs=names.MODELS["dense"],
        outside={
            "model": model.directory or model.code,
            "weights": None if model.weights is None else Path(model.weights),
        },
        settings=settings,
        tools=TORCH,
    )


def _held_out_moments(recipe: Recipe) -> tuple[str, ...]:
    return () if recipe.calibration.hold_out is None else (names.HELD_OUT_MOMENTS,)


def _moments_stage(recipe: Recipe, root: Path) -> Stage:
    calibration, calibrate = recipe.calibration, calls.calibrate_call(recipe, root)
    on_gpu = calibration.device == "cuda"
    # How the system is taken stands in what the command says of it.
    of_command = ("images", "workers", "attention_system", "group_labels", "active_eps", "snapshots")
    optional_keys = ("attention_system", "residual", "active_eps", "snapshots", "attn", "align")
    return stage(
        "moments",
        calibrate,
        outputs=(names.MOMENTS, names.SUMMARY, *names.snapshots_of(recipe), *_held_out_moments(recipe)),
        reads=names.MODELS["dense"],
        outside=_calibrating(recipe),
        settings=settings_of("calibration", calibration, without=of_command)
        | {key: calibrate[key] for key in optional_keys if calibrate[key] is not None}
        | {f"reduce.{name}": value for name, value in recipe.reduce.of_statistics.command_options.items()},
        tools=() if on_gpu else TORCH,
        missing=missing_gpu if on_gpu else lambda: None,
    )


def _calibrating(recipe: Recipe, *, grouped: bool = True) -> dict[str, Path | None]:
    table = recipe.calibration
    return {"calibration.images": table.images, "calibration.group_labels": table.group_labels if grouped else None}


def _drawn(recipe: Recipe, *keys: str) -> dict[str, Any]:
    return {f"calibration.{key}": getattr(recipe.calibration, key) for key in keys}


def _reduction(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the reduction; measured tables are of this machine and not of the recipe."""
    return settings_of("reduce", recipe.reduce, without=("latency_tables",))


def _reduce_stage(recipe: Recipe, root: Path) -> Stage:
    reduce, own = calls.reduce_call(recipe, root), ("hold_out", "groups") if recipe.proves_on_own else ()
    looks = "images" in reduce.options
    return stage(
        "reduce",
        reduce,
        step("reduce", reduce, recipe.reduce),
        outputs=(*names.MODELS["reduced"], *([names.SAVED_AS_HF] if recipe.reduce.save_as else [])),
        reads=(*names.MODELS["dense"], names.MOMENTS, *_held_out_moments(recipe)),
        outside=_calibrating(recipe, grouped=recipe.proves_on_own) if looks else {},
        settings=_reduction(recipe) | (_drawn(recipe, "samples", "seed", "max_bad", *own) if looks else {}),
        tools=TORCH,
    )


def _size_stage(recipe: Recipe) -> Stage:
    moments = (*names.snapshots_of(recipe), names.MOMENTS, *_held_out_moments(recipe))
    return stage(
        "size",
        calls.only_call("size", recipe),
        step("size", recipe),
        outputs=(names.SIZE,),
        reads=(*names.BOTH_MODELS, *moments),
        outside=_proving(recipe) | {"calibration.images": recipe.calibration.images},
        settings=_reduction(recipe) | _drawn_for_proof(recipe),
        tools=TORCH,
    )


def _export_stage(recipe: Recipe, root: Path, subject: str) -> Stage:
    export, ranges = calls.export_call(recipe, root, subject), bool(recipe.export.quantised)
    return stage(
        f"export.{subject}",
        export,
        step("export", export, recipe.export),
        outputs=names.graphs_of(recipe, subject),
        reads=names.MODELS[subject],
        outside={"calibration.images": recipe.calibration.images if ranges else None},
        settings=settings_of("export", recipe.export)
        | {f"ranges.{name}": export[name] for name in ("samples", "seed") if ranges},
        tools=(*TORCH, "onnx", "onnxscript"),
    )


def _labels_file(recipe: Recipe) -> Path | None:
    labels = recipe.held_out.labels
    return None if labels is None else labels_file(labels)


def _proving(recipe: Recipe) -> dict[str, Path | None]:
    return _calibrating(recipe) if recipe.proves_on_own else {"held_out.images": recipe.held_out.images}


def _drawn_for_proof(recipe: Recipe) -> dict[str, Any]:
    if recipe.proves_on_own:
        return _drawn(recipe, "samples", "seed", "hold_out", "groups")
    return {"held_out.samples": recipe.held_out.samples, "held_out.seed": recipe.held_out.seed}


def _samples_stage(recipe: Recipe) -> Stage:
    answers = (names.answers_name(subject, each) for subject in names.SUBJECTS for each in recipe.export.precisions)
    labelled = names.has_sample_labels(recipe)
    return stage(
        "samples",
        calls.only_call("samples", recipe),
        step("samples", recipe),
        outputs=(names.SAMPLES, names.SAMPLES_RECORD, *((names.SAMPLE_LABELS,) if labelled else ()), *answers),
        reads=(*names.MODELS["dense"], *names.graphs_of(recipe, "dense"), *names.graphs_of(recipe, "reduced")),
        outside=_proving(recipe) | {"held_out.labels": _labels_file(recipe) if labelled else None},
        settings=_drawn_for_proof(recipe)
        | ({"samples.named": True} if recipe.parity.metric else {})
        | {"samples.count": recipe.samples.count},
        tools=(*TORCH, "onnxruntime"),
    )


def _parity_stage(recipe: Recipe, root: Path) -> Stage:
    return stage(
        "parity",
        calls.verify_call(recipe, root),
        outputs=(names.PARITY, names.outputs_name(names.PARITY)),
        reads=(*names.BOTH_MODELS, names.MOMENTS, *names.graphs_of(recipe, "reduced")),
        outside=_proving(recipe) | heads_read(recipe) | {"held_out.labels": _labels_file(recipe)},
        settings=settings_of("parity", recipe.parity, without=("head", "metric_files")) | _drawn_for_proof(recipe),
        tools=(*TORCH, "onnxruntime"),
    )


def _package_stage(recipe: Recipe, root: Path) -> Stage:
    package = calls.package_call(recipe, root)
    plans = [names.artefact_name(target, "reduced") for target in recipe.targets if target.is_engine]
    records = (*(f"{plan}.json" for plan in plans), *_benches(recipe), *names.parities_of(recipe), names.GATE)
    return stage(
        "package",
        package,
        outputs=(f"{names.REPOSITORY}/",),
        reads=(names.MODELS["reduced"][0], *names.graphs_of(recipe, "reduced"), *plans, *records),
        outside={"package.labels": recipe.package.labels},
        settings={key: package[key] for key in ("name", "cpu_backend", "allow_failed")},
    )


def _benches(recipe: Recipe) -> tuple[str, ...]:
    return tuple(names.bench_name(recipe, target) for target in recipe.targets)


def _measured(recipe: Recipe) -> tuple[str, ...]:
    return (*_benches(recipe), *names.gains_of(recipe), *names.parities_of(recipe))


BASELINES = {"bench": "baseline", "parity": "baseline_parity"}


def _gate_stage(recipe: Recipe, root: Path, baseline: Baseline) -> Stage:
    def earlier() -> tuple[Mapping[str, Path], Mapping[str, Any]]:
        """Look for older records when the bench stands, which may be the very baseline."""
        older, history = baseline.older(names.own_records(recipe, root)), recipe.gate.history
        known = {} if history is None else {"gate.history": _earlier(history, root / _benches(recipe)[0])}
        return {label: older[kind] for kind, label in BASELINES.items() if kind in older}, known

    rules = settings_of("gate", recipe.gate, without=("history",))
    rules |= {f"targets.{target.name}.fail_if": [rule.text for rule in target.rules] for target in recipe.targets}
    return stage(
        "gate",
        calls.gate_call(recipe, root, baseline),
        step("gate", recipe, baseline),
        outputs=(names.GATE, *(names.HISTORY if recipe.gate.history else ())),
        reads=_measured(recipe),
        settings={**rules, "targets": [target.name for target in recipe.targets]},
        earlier=earlier,
    )


def _earlier(history: Path, bench: Path) -> list[str]:
    """Return the records before this one: a later release changes no verdict of an older one."""
    if not bench.is_file() or not history.is_dir():
        return []
    own = f"{release_of_file(bench).name}.json"
    return sorted(path.name for path in history.iterdir() if not path.name.startswith(".") and path.name < own)


def _report_stage(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Stage:
    commands, stage_names = [each.command for each in before], [each.name for each in before]
    optional = (
        *(names.HISTORY if recipe.gate.history else ()),
        *((names.SIZE,) if recipe.calibration.snapshots else ()),
    )
    return stage(
        "report",
        calls.release_call(recipe, baseline, root, "report"),
        step("report", recipe, commands, stage_names),
        outputs=(*names.REPORTS, names.CARD, *(names.page_name(target) for target in recipe.targets[1:])),
        reads=(names.RECIPE, names.MODELS["reduced"][0], names.SUMMARY, *_measured(recipe), names.GATE, *optional),
        settings={"commands": commands},
    )


def _manifest_stage(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Stage:
    command, own = (str(calls.release_call(recipe, baseline, root, *only)) for only in ((), ("manifest",)))
    return Stage(
        name="manifest",
        outputs=(names.BILL, names.MANIFEST, names.PROVENANCE, names.SUMS),
        run=step("manifest", recipe, before, command, own),
        reads=tuple(name for each in before for name in each.outputs if not name.startswith(".")),
        settings={"versions": versions(), "commands": [command, *(each.command for each in before)]},
    )


def stages_of(recipe: Recipe, root: Path, baseline: Baseline) -> list[Stage]:
    text = text_of_recipe(recipe, root)
    recipe_stage = Stage(
        name="recipe",
        outputs=(names.RECIPE,),
        run=lambda dirs: write_text(dirs.into / names.RECIPE, text),
        settings={"recipe": text},
        command=str(calls.only_call("recipe", recipe)),
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
        *(each for target in recipe.targets for each in target_stages(recipe, target)),
        _gate_stage(recipe, root, baseline),
        *([] if recipe.package.name is None else [_package_stage(recipe, root)]),
    ]
    # Torch works on the GPU in one stage alone; a builder's own memory there is not torch's to tell.
    devices = {"moments": recipe.calibration.device}
    stages = [timed(each, devices.get(each.name, "cpu")) for each in stages]
    stages.append(_report_stage(recipe, root, tuple(stages), baseline))
    stages.append(_manifest_stage(recipe, root, tuple(stages), baseline))
    return stages
