"""The stages of a recipe, in an order in which each finds what it reads. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corp_deploy.machine import versions
from ground.files import write_text
from ground.gpu import missing_gpu
from perf.record.history import release_of_file

from . import calls, names
from .baseline import Baseline
from .incremental import Stage
from .recipe import Recipe
from .recipe_tables import ModelTable
from .recipe_toml import text_of_recipe
from .stage_effort import timed
from .stage_parts import TORCH, command_step, heads_read, own_step, settings_of, tool
from .target_stages import target_stages


def _recipe_stage(recipe: Recipe, root: Path) -> Stage:
    text = text_of_recipe(recipe, root)
    return Stage(
        name="recipe",
        outputs=(names.RECIPE,),
        run=lambda dirs: write_text(dirs.into / names.RECIPE, text),
        settings={"recipe": text},
        command=str(calls.only("recipe", recipe)),
    )


def _name(model: ModelTable) -> str:
    """What the model is called; of a user's code the function, as the file is told of by its content."""
    return str(model.model if model.code is None else model.model.rpartition(":")[2])


def _dense_stage(recipe: Recipe) -> Stage:
    model = recipe.model
    outside = {"model": model.directory or model.code, "weights": model.weights}
    name = {} if model.directory is not None else {"model.model": _name(model)}
    return Stage(
        name="dense",
        outputs=names.MODELS["dense"],
        run=own_step("dense", recipe),
        outside={label: path for label, path in outside.items() if path is not None},
        settings=name | settings_of("model", model, without=("model", "weights")) | {"versions": tool(*TORCH)},
        command=str(calls.only("dense", recipe)),
    )


def _held_out_moments(recipe: Recipe) -> tuple[str, ...]:
    return () if recipe.calibration.hold_out is None else (names.HELD_OUT_MOMENTS,)


def _moments_stage(recipe: Recipe, root: Path) -> Stage:
    calibration, calibrate = recipe.calibration, calls.calibrate(recipe, root)
    on_gpu = calibration.device == "cuda"
    # How the system is taken stands in what the command says of it.
    drawn = settings_of(
        "calibration",
        calibration,
        without=("images", "workers", "attention_system", "group_labels", "active_eps", "snapshots"),
    )
    optional_keys = ("attention_system", "residual", "active_eps", "snapshots", "attn", "align")
    system = {key: calibrate[key] for key in optional_keys if calibrate[key] is not None}
    merging = {f"reduce.{name}": value for name, value in recipe.reduce.choice.of_statistics.command_options.items()}
    return Stage(
        name="moments",
        outputs=(names.MOMENTS, names.SUMMARY, *names.snapshots_of(recipe), *_held_out_moments(recipe)),
        run=command_step(calibrate),
        reads=names.MODELS["dense"],
        outside=_calibrating(recipe),
        settings=drawn | system | merging | {"versions": tool(*() if on_gpu else TORCH)},
        missing=missing_gpu if on_gpu else lambda: None,
        command=str(calibrate),
    )


def _calibrating(recipe: Recipe, *, grouped: bool = True) -> dict[str, Path]:
    """The images of the calibration, with the file that says which belong together."""
    images, labels = recipe.calibration.images, recipe.calibration.group_labels if grouped else None
    return {"calibration.images": images} | ({} if labels is None else {"calibration.group_labels": labels})


def _reduction(recipe: Recipe) -> dict[str, Any]:
    """How it is asked for; what the latency tables hold is of this machine and not of the recipe."""
    return settings_of("reduce", recipe.reduce, without=("latency_tables",))


def _reduce_stage(recipe: Recipe, root: Path) -> Stage:
    calibration, reduce = recipe.calibration, calls.reduce(recipe, root)
    drawn = {f"calibration.{key}": getattr(calibration, key) for key in ("samples", "seed", "max_bad")}
    if recipe.proves_on_own:
        drawn |= {f"calibration.{key}": getattr(calibration, key) for key in ("hold_out", "groups")}
    looks = "images" in reduce.options
    return Stage(
        name="reduce",
        outputs=(*names.MODELS["reduced"], *([names.SAVED_AS_HF] if recipe.reduce.save_as else [])),
        run=command_step(reduce),
        reads=(*names.MODELS["dense"], names.MOMENTS, *_held_out_moments(recipe)),
        outside=_calibrating(recipe, grouped=recipe.proves_on_own) if looks else {},
        settings=_reduction(recipe) | (drawn if looks else {}) | {"versions": tool(*TORCH)},
        command=str(reduce),
    )


def _size_stage(recipe: Recipe) -> Stage:
    """How many calibration images are enough, by the snapshots."""
    return Stage(
        name="size",
        outputs=(names.SIZE,),
        run=own_step("size", recipe),
        reads=(
            *names.MODELS["dense"],
            *names.MODELS["reduced"],
            *names.snapshots_of(recipe),
            names.MOMENTS,
            *_held_out_moments(recipe),
        ),
        outside=_proving(recipe) | {"calibration.images": recipe.calibration.images},
        settings=_reduction(recipe) | _drawn_for_proof(recipe) | {"versions": tool(*TORCH)},
        command=str(calls.only("size", recipe)),
    )


def _export_stage(recipe: Recipe, root: Path, subject: str) -> Stage:
    export = calls.export(recipe, root, subject)
    ranges = {"calibration.images": recipe.calibration.images} if recipe.export.quantised else {}
    drawn = {f"ranges.{name}": export[name] for name in ("samples", "seed")} if ranges else {}
    return Stage(
        name=f"export.{subject}",
        outputs=names.graphs_of(recipe, subject),
        run=command_step(export),
        reads=names.MODELS[subject],
        outside=ranges,
        settings=settings_of("export", recipe.export) | drawn | {"versions": tool(*TORCH, "onnx", "onnxscript")},
        command=str(export),
    )


def _proving(recipe: Recipe) -> dict[str, Path]:
    """The images that the result is proved on."""
    images = recipe.held_out.images
    return _calibrating(recipe) if images is None else {"held_out.images": images}


def _drawn_for_proof(recipe: Recipe) -> dict[str, Any]:
    if recipe.proves_on_own:
        drawn = ("samples", "seed", "hold_out", "groups")
        return {f"calibration.{key}": getattr(recipe.calibration, key) for key in drawn}
    return {"held_out.samples": recipe.held_out.samples, "held_out.seed": recipe.held_out.seed}


def _samples_stage(recipe: Recipe) -> Stage:
    pairs = [(subject, precision) for subject in names.SUBJECTS for precision in recipe.export.precisions]
    labels = recipe.held_out.labels if names.has_sample_labels(recipe) else None
    files = (names.SAMPLES, names.SAMPLES_RECORD, *(() if labels is None else (names.SAMPLE_LABELS,)))
    named = {"samples.named": True} if recipe.parity.metric else {}
    return Stage(
        name="samples",
        outputs=(*files, *(names.answers_name(subject, precision) for subject, precision in pairs)),
        run=own_step("samples", recipe),
        reads=(*names.MODELS["dense"], *names.graphs_of(recipe, "dense"), *names.graphs_of(recipe, "reduced")),
        outside=_proving(recipe) | ({} if labels is None else {"held_out.labels": labels}),
        settings=_drawn_for_proof(recipe)
        | named
        | {"samples.count": recipe.samples.count, "versions": tool(*TORCH, "onnxruntime")},
        command=str(calls.only("samples", recipe)),
    )


def _parity_stage(recipe: Recipe, root: Path) -> Stage:
    verify, labels = calls.verify(recipe, root), recipe.held_out.labels
    outside = _proving(recipe) | heads_read(recipe)
    return Stage(
        name="parity",
        outputs=(names.PARITY, names.outputs_name(names.PARITY)),
        run=command_step(verify),
        reads=(*names.MODELS["dense"], *names.MODELS["reduced"], names.MOMENTS, *names.graphs_of(recipe, "reduced")),
        outside=outside if labels is None else outside | {"held_out.labels": labels},
        settings=settings_of("parity", recipe.parity, without=("head", "metric_files"))
        | _drawn_for_proof(recipe)
        | {"versions": tool(*TORCH, "onnxruntime")},
        command=str(verify),
    )


def _package_stage(recipe: Recipe, root: Path) -> Stage:
    """The Triton model repository of everything that was built."""
    package, labels = calls.package(recipe, root), recipe.package.labels
    plans = [names.artefact_name(target, "reduced") for target in recipe.targets if target.is_engine]
    records = (*plans, *(f"{plan}.json" for plan in plans), *_benches(recipe), *names.parities_of(recipe))
    return Stage(
        name="package",
        outputs=(f"{names.REPOSITORY}/",),
        run=command_step(package),
        reads=(*names.graphs_of(recipe, "reduced"), *records),
        outside={} if labels is None else {"package.labels": labels},
        settings={"package.name": recipe.package.name, "cpu_backend": package["cpu_backend"], "versions": tool()},
        command=str(package),
    )


def _benches(recipe: Recipe) -> tuple[str, ...]:
    return tuple(names.bench_name(recipe, target) for target in recipe.targets)


def own_records(recipe: Recipe, root: Path) -> dict[str, Path]:
    """Those of the first target, by which the recipe's rules are judged, by their kind."""
    first = recipe.targets[0]
    return {"bench": root / names.bench_name(recipe, first), "parity": root / names.parity_name(first)}


def _gate_stage(recipe: Recipe, root: Path, baseline: Baseline) -> Stage:
    older = baseline.older(own_records(recipe, root))
    labels = {"bench": "baseline", "parity": "baseline_parity"}
    rules = settings_of("gate", recipe.gate, without=("history",))
    rules |= {f"targets.{target.name}.fail_if": [rule.text for rule in target.rules] for target in recipe.targets}
    if recipe.gate.history is not None:
        rules["gate.history"] = _earlier(recipe.gate.history, root / _benches(recipe)[0])
    return Stage(
        name="gate",
        outputs=(names.GATE, *(names.HISTORY if recipe.gate.history else ())),
        run=own_step("gate", recipe, older, baseline.init),
        reads=(*_benches(recipe), *names.gains_of(recipe), *names.parities_of(recipe)),
        outside={labels[kind]: path for kind, path in older.items()},
        settings={**rules, "targets": [target.name for target in recipe.targets], "versions": tool()},
        command=str(calls.gate(recipe, root, baseline)),
    )


def _earlier(history: Path, bench: Path) -> list[str]:
    """The records that the gate judges this one by: a release made later changes no verdict of an older one."""
    if not bench.is_file() or not history.is_dir():
        return []
    own = f"{release_of_file(bench).name}.json"
    return sorted(path.name for path in history.iterdir() if not path.name.startswith(".") and path.name < own)


def _report_stage(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Stage:
    commands, stage_names = [stage.command for stage in before], [stage.name for stage in before]
    return Stage(
        name="report",
        outputs=(*names.REPORTS, names.CARD, *(names.page_name(target) for target in recipe.targets[1:])),
        run=own_step("report", recipe, commands, stage_names),
        reads=(
            names.RECIPE,
            names.MODELS["reduced"][0],
            names.SUMMARY,
            *_benches(recipe),
            *names.gains_of(recipe),
            *names.parities_of(recipe),
            names.GATE,
            *(names.HISTORY if recipe.gate.history else ()),
            *((names.SIZE,) if recipe.calibration.snapshots else ()),
        ),
        settings={"commands": commands, "versions": tool()},
        command=str(calls.release_call(recipe, baseline, root, "report")),
    )


def _manifest_stage(recipe: Recipe, root: Path, before: Sequence[Stage], baseline: Baseline) -> Stage:
    command = str(calls.release_call(recipe, baseline, root))
    own = str(calls.release_call(recipe, baseline, root, "manifest"))
    return Stage(
        name="manifest",
        outputs=(names.BILL, names.MANIFEST, names.PROVENANCE, names.SUMS),
        run=own_step("manifest", recipe, before, command, own),
        reads=tuple(name for stage in before for name in stage.outputs if not name.startswith(".")),
        settings={"versions": versions(), "commands": [command, *(stage.command for stage in before)]},
    )


def stages_of(recipe: Recipe, root: Path, baseline: Baseline) -> list[Stage]:
    """Every stage of the recipe."""
    stages = [
        _recipe_stage(recipe, root),
        _dense_stage(recipe),
        _moments_stage(recipe, root),
        _reduce_stage(recipe, root),
        *([_size_stage(recipe)] if recipe.calibration.snapshots else []),
        *(_export_stage(recipe, root, subject) for subject in names.SUBJECTS),
        _samples_stage(recipe),
        _parity_stage(recipe, root),
    ]
    for target in recipe.targets:
        stages += target_stages(recipe, target)
    stages.append(_gate_stage(recipe, root, baseline))
    if recipe.package.name is not None:
        stages.append(_package_stage(recipe, root))
    # Torch works on the GPU in one stage alone; a builder's own memory there is not torch's to tell.
    devices = {"moments": recipe.calibration.device}
    stages = [timed(stage, devices.get(stage.name, "cpu")) for stage in stages]
    stages.append(_report_stage(recipe, root, tuple(stages), baseline))
    stages.append(_manifest_stage(recipe, root, tuple(stages), baseline))
    return stages
