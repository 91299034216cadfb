"""The commands of a release: each stage's options and their values, by the recipe. Imports no torch."""

from pathlib import Path
from typing import Any

from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.option import Invocation, Pairs, Record, path_from
from corp_deploy.invocation.proof import ProofOptions
from corp_deploy.invocation.running import PlanOptions

from . import names
from .baseline import Baseline
from .recipe import Recipe
from .targets import ReleaseTarget, run_options

SAVE_EVERY_IMAGES = 1024
RANGE_SAMPLES = 128


def _beside(baseline: Baseline, root: Path) -> dict[str, Any]:
    return {
        name: path_from(root, value) if isinstance(value, Path) else value
        for name, value in baseline.command_options.items()
    }


def release_call(recipe: Recipe, baseline: Baseline, root: Path, *only: str) -> Invocation:
    """The release itself in its own directory, or some of its stages alone, which no other command makes."""
    measures = not only or only[0].startswith(names.PARITY_OF_TARGET)
    options = {"output": ".", "only": [*only], **_beside(baseline, root), **recipe.trust(measures=measures)}
    return Invocation(command="release", arguments=(names.RECIPE,), options=options)


def only_call(stage: str, recipe: Recipe) -> Invocation:
    return release_call(recipe, Baseline(), Path(), stage)


def _groups(recipe: Recipe, root: Path) -> str | None:
    return path_from(root, recipe.calibration.group_labels) or recipe.calibration.groups


def _some(table: Record, *keys: str) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def calibrate_call(recipe: Recipe, root: Path) -> Invocation:
    calibration = recipe.calibration
    restricted = calibration.attention_system == "kept"
    return Invocation(
        command="calibrate",
        options={
            "model": "dense",
            **recipe.model.trust,
            "images": path_from(root, calibration.images),
            **_some(calibration, "samples", "seed", "batch_size", "device", "workers", "max_bad"),
            "attention_system": recipe.reduce.method_asked.needs_attention_system,
            "residual": bool(recipe.reduce.residual),
            "active_eps": calibration.active_eps,
            "snapshots": calibration.snapshots or None,
            "attn": (recipe.reduce.attn,) if restricted else None,
            "align": Pairs(head=recipe.reduce.align.get("head")) if restricted else None,
            **recipe.reduce.of_statistics.command_options,
            "hold_out": calibration.hold_out,
            "groups": _groups(recipe, root),
            "checkpoint_every": SAVE_EVERY_IMAGES,
            "summary": names.SUMMARY,
            "output": names.MOMENTS,
        },
    )


def reduce_call(recipe: Recipe, root: Path) -> Invocation:
    choice, calibration = recipe.reduce, recipe.calibration
    options = {
        "model": "dense",
        **recipe.model.trust,
        "moments": names.MOMENTS,
        "held_out": names.HELD_OUT_MOMENTS if recipe.judges_sites else None,
        **choice.command_options,
        "latency_tables": path_from(root, choice.latency_tables),
        "images": path_from(root, calibration.images),
        **_some(calibration, "samples", "seed", "workers", "max_bad"),
        # What proves the result is looked at by nothing before.
        "hold_out": calibration.hold_out if recipe.proves_on_own else None,
        "groups": _groups(recipe, root) if recipe.proves_on_own else None,
        "output": "reduced",
    }
    for axis, way in choice.ways:  # what these do something with; they would refuse to be told the others
        options = axis.supported(way, options)
    return Invocation(command="reduce", options=options)


def range_samples(recipe: Recipe) -> int:
    """How many calibration images the ranges of INT8 and FP8 are computed from."""
    return min(recipe.export.range_samples or RANGE_SAMPLES, recipe.calibration.samples or RANGE_SAMPLES)


def export_call(recipe: Recipe, root: Path, subject: str) -> Invocation:
    """INT8 and FP8 graphs are made by some of the calibration's own images."""
    table, precisions, drawn = recipe.export, recipe.export.precisions, recipe.calibration
    ranges = {"images": path_from(root, drawn.images), "samples": range_samples(recipe), "seed": drawn.seed}
    return Invocation(
        command="export",
        options={
            "model": subject,
            **recipe.model.trust,
            **ExportOptions.from_options(table.values).command_options,
            **(ranges if table.quantised else {}),
            "output": f"{subject}/{names.graph_name(precisions[0] if len(precisions) == 1 else 'fp32')}",
        },
    )


def verify_call(recipe: Recipe, root: Path) -> Invocation:
    proving, parity = recipe.proof_images, recipe.parity
    return Invocation(
        command="verify",
        arguments=(*names.SUBJECTS, *names.graphs_of(recipe, "reduced")),
        options={
            **recipe.model.trust,
            "images": path_from(root, proving.images),
            "labels": path_from(root, recipe.held_out.labels),
            **proving.drawn,
            "hold_out": proving.hold_out,
            "groups": _groups(recipe, root) if recipe.proves_on_own else None,
            "moments": names.MOMENTS,
            **ProofOptions.from_options(parity.values).command_options,
            "head": [path_from(root, path) for path in parity.heads],
            "metric": parity.metrics(root),
            "output": names.PARITY,
        },
    )


def bench_call(recipe: Recipe, target: ReleaseTarget) -> Invocation:
    """Dense against reduced."""
    dense, reduced = (names.artefact_name(target, subject) for subject in names.SUBJECTS)
    return _bench(recipe, target, dense, reduced, names.bench_name(recipe, target))


def gain_call(recipe: Recipe, target: ReleaseTarget) -> Invocation:
    """The reduced model as a quantised target runs it against the precision that it rests on."""
    sides = names.rival_name(target), names.artefact_name(target, "reduced")
    return _bench(recipe, target, *sides, names.gain_name(target), names=(target.rest, target.precision))


def _bench(
    recipe: Recipe, target: ReleaseTarget, reference: str, candidate: str, output: str, **called: Any
) -> Invocation:
    table = recipe.bench
    return Invocation(
        command="bench",
        arguments=(reference, candidate),
        options={
            **run_options(target, table.threads),
            **recipe.model.trust,
            **called,
            "batch": table.batches,
            "images": names.SAMPLES,
            **PlanOptions.from_options(table.values).command_options,
            "output": output,
        },
    )


def gate_call(recipe: Recipe, root: Path, baseline: Baseline) -> Invocation:
    """`gate` judges one measurement and one proof; where there are more the stage itself does."""
    first, *others = recipe.targets
    if others or first.rules or first.rest or names.parity_name(first) != names.PARITY:
        return release_call(recipe, baseline, root, "gate")
    return Invocation(
        command="gate",
        arguments=(names.bench_name(recipe, first), names.PARITY),
        options={
            "fail_if": list(recipe.gate.rules),
            **({"confidence": recipe.gate.confidence} if recipe.gate.rules else {}),
            **_beside(baseline, root),
            "history": path_from(root, recipe.gate.history),
            "output": [names.GATE],
        },
    )


def package_call(recipe: Recipe, root: Path) -> Invocation:
    options = {
        "name": recipe.package.name,
        "model_version": 1,
        "labels": path_from(root, recipe.package.labels),
        "allow_failed": recipe.package.allow_failed,
        "cpu_backend": "openvino" if recipe.served_on_cpu == "openvino" else None,
        "output": names.REPOSITORY,
    }
    return Invocation(command="package", arguments=(".",), options=options)
