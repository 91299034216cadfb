"""The stages of a release that make its models, graphs and samples, and prove them. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.option import Invocation, Pairs, path_from
from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.spec.class_labels import labels_file
from ground.gpu import missing_gpu
from ground.places import Place

from . import names
from .incremental import Stage
from .recipe import Recipe
from .stage import settings_of, stage, stage_call, step

SAVE_EVERY_IMAGES = 1024
TORCH = ("torch", "timm", "numpy")


def _calibration_paths(recipe: Recipe, *, grouped: bool = True) -> dict[str, Place | None]:
    table = recipe.calibration
    return {"calibration.images": table.images, "calibration.group_labels": table.group_labels if grouped else None}


def _calibration_values(recipe: Recipe, *keys: str, prefix: str = "calibration.") -> dict[str, Any]:
    return {f"{prefix}{key}": getattr(recipe.calibration, key) for key in keys}


def _groups(recipe: Recipe, root: Path) -> str | None:
    return path_from(root, recipe.calibration.group_labels) or recipe.calibration.groups


def _held_out_moments(recipe: Recipe) -> tuple[str, ...]:
    return () if recipe.calibration.hold_out is None else (names.HELD_OUT_MOMENTS,)


def _proof_paths(recipe: Recipe) -> dict[str, Place | None]:
    return _calibration_paths(recipe) if recipe.proves_on_calibration else {"held_out.images": recipe.held_out.images}


def _proof_keys(recipe: Recipe) -> dict[str, Any]:
    if recipe.proves_on_calibration:
        return _calibration_values(recipe, "samples", "seed", "hold_out", "groups")
    return {"held_out.samples": recipe.held_out.samples, "held_out.seed": recipe.held_out.seed}


def _labels_file(recipe: Recipe) -> Path | None:
    labels = recipe.held_out.labels
    return None if labels is None else labels_file(labels)


def _labels_word(recipe: Recipe) -> dict[str, Any]:
    """Return the word that stands for labels, `folders` or a column's name, in place of a file."""
    labels = recipe.held_out.labels
    return {} if labels is None or _labels_file(recipe) else {"held_out.labels": labels.name}


def _reduce_settings(recipe: Recipe) -> dict[str, Any]:
    return settings_of("reduce", recipe.reduce, without=("latency_tables",))  # the machine's own


def parity_settings(recipe: Recipe) -> dict[str, Any]:
    return settings_of("parity", recipe.parity, without=("head", "metric_files"))


def parity_paths(recipe: Recipe) -> Mapping[str, Path]:
    heads, files = map(Path, recipe.parity.heads), recipe.parity.metric_files
    return {
        **{f"parity.head.{place}": path for place, path in enumerate(heads)},
        **{f"parity.metric_files.{place}": path for place, path in enumerate(files)},
    }


def dense_stage(recipe: Recipe) -> Stage:
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


def moments_stage(recipe: Recipe, root: Path) -> Stage:
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


def reduce_stage(recipe: Recipe, root: Path) -> Stage:
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


def size_stage(recipe: Recipe) -> Stage:
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


def export_stage(recipe: Recipe, root: Path, subject: str) -> Stage:
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


def samples_stage(recipe: Recipe) -> Stage:
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
        | (_labels_word(recipe) if labelled else {})
        | ({"samples.named": True} if recipe.parity.metric else {})
        | {"samples.count": recipe.samples.count},
        tools=(*TORCH, "onnxruntime"),
    )


def parity_stage(recipe: Recipe, root: Path) -> Stage:
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
        outside={**_proof_paths(recipe), **parity_paths(recipe), "held_out.labels": _labels_file(recipe)},
        settings=parity_settings(recipe) | _proof_keys(recipe) | _labels_word(recipe),
        tools=(*TORCH, "onnxruntime"),
    )
