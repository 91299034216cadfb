"""The commands of a release: each stage's options and their values, by the recipe. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corp_deploy.invocation.call import Invocation, Pairs, path_from
from corp_deploy.invocation.honours import Axis
from corp_deploy.invocation.table import ATTENTION, IMAGES, LOOP, PRESET
from corp_deploy.reduction.method import loop_from

from .baseline import Baseline
from .recipe import Recipe, Target
from .targets import artefact_name, graph_name, running_words

MOMENTS = ".stages/moments.safetensors"
HELD_OUT_MOMENTS = ".stages/moments.held-out.safetensors"
SUMMARY = "moments.json"
SAMPLES = "samples/images.npy"
SUBJECTS = ("dense", "reduced")
SAVE_EVERY_IMAGES = 1024


def bench_name(recipe: Recipe, target: Target) -> str:
    """bench.json of the first target, bench.TARGET.json of the others."""
    return "bench.json" if target == recipe.targets[0] else f"bench.{target.name}.json"


def parity_name(target: Target) -> str:
    """parity.json covers ONNX Runtime on the CPU; what needs a GPU has its own record."""
    return "parity.json" if target.name == "onnxruntime-cpu" else f"parity.{target.name}.json"


def graphs_of(recipe: Recipe, subject: str) -> tuple[str, ...]:
    """The files of a subject's graphs, one a precision."""
    return tuple(f"{subject}/{graph_name(precision)}" for precision in recipe["export"]["precisions"])


def _path(recipe: Recipe, table: str, key: str, root: Path) -> str | None:
    return path_from(root, recipe.optional_path(table, key))


def _beside(baseline: Baseline, root: Path) -> dict[str, Any]:
    return {"baseline": path_from(root, baseline.path), "init_baseline": baseline.init}


def whole(baseline: Baseline, root: Path) -> Invocation:
    """The release itself, in its own directory."""
    options = {"output": ".", **_beside(baseline, root)}
    return Invocation(command="release", arguments=("recipe.toml",), options=options)


def only(stage: str) -> Invocation:
    """One stage, for what no other command makes."""
    options = {"output": ".", "only": [stage]}
    return Invocation(command="release", arguments=("recipe.toml",), options=options)


def only_beside(stage: str, baseline: Baseline, root: Path) -> Invocation:
    """One stage that judges by the baseline, or tells of it."""
    options = {"output": ".", "only": [stage], **_beside(baseline, root)}
    return Invocation(command="release", arguments=("recipe.toml",), options=options)


def calibrate(recipe: Recipe, root: Path) -> Invocation:
    given, wanted = recipe["calibration"], recipe["reduce"]
    restricted = given["attention_system"] == "kept"
    return Invocation(
        command="calibrate",
        options={
            "model": "dense",
            "images": _path(recipe, "calibration", "images", root),
            **{key: given[key] for key in ("samples", "seed", "batch_size", "device", "workers", "max_bad")},
            "attention_system": recipe.method.needs_attention_system,
            "attn": (wanted["attn"],) if restricted else None,
            "align": Pairs(head=wanted["align_head"]) if restricted else None,
            "hold_out": given["hold_out"],
            "checkpoint_every": SAVE_EVERY_IMAGES,
            "summary": SUMMARY,
            "output": MOMENTS,
        },
    )


def _honoured(options: Mapping[str, Any], *ways: tuple[Axis, str]) -> dict[str, Any]:
    """What the ways at work do something with; the others would refuse to be told."""
    left = dict(options)
    for axis, way in ways:
        left = axis.honoured(way, left)
    return left


def reduce(recipe: Recipe, root: Path) -> Invocation:
    wanted, calibration = recipe["reduce"], recipe["calibration"]
    budget = wanted["macs"] is not None or wanted["params"] is not None
    touched = budget or wanted["heads"] == "auto" or wanted["attn"] is not None
    select = Pairs(mlp=wanted["select_mlp"], head=wanted["select_head"])
    options = {
        "model": "dense",
        "moments": MOMENTS,
        "held_out": None if calibration["hold_out"] is None else HELD_OUT_MOMENTS,
        **{key: None if budget else wanted[key] for key in ("mlp", "attn")},
        **{key: wanted[key] for key in ("macs", "params", "preset", "heads", "closed_loop", "reads")},
        "allow_partial": wanted["allow_partial"],
        "select": select if str(select) else None,
        "align": Pairs(mlp=wanted["align_mlp"], head=wanted["align_head"]),
        "ridge": wanted["ridge"],
        "images": _path(recipe, "calibration", "images", root),
        **{key: calibration[key] for key in ("samples", "seed", "workers", "max_bad")},
        "device": "cpu",
        "output": "reduced",
    }
    ways = (
        (PRESET, wanted["preset"]),
        (ATTENTION, "reduced" if touched else "kept"),
        (LOOP, loop_from(wanted["closed_loop"]) or "open"),
        (IMAGES, "images" if recipe.reduces_on_images else "none"),
    )
    return Invocation(command="reduce", options=_honoured(options, *ways))


def export(recipe: Recipe, subject: str) -> Invocation:
    precisions = tuple(recipe["export"]["precisions"])
    return Invocation(
        command="export",
        options={
            "model": subject,
            "precision": precisions,
            "keep_fp32": list(recipe["export"]["keep_fp32"]),
            "output": f"{subject}/{graph_name(precisions[0] if len(precisions) == 1 else 'fp32')}",
        },
    )


def verify(recipe: Recipe, root: Path) -> Invocation:
    held_out, parity = recipe["held_out"], recipe["parity"]
    return Invocation(
        command="verify",
        arguments=(*SUBJECTS, *graphs_of(recipe, "reduced")),
        options={
            "images": _path(recipe, "held_out", "images", root),
            "labels": _path(recipe, "held_out", "labels", root),
            **{key: held_out[key] for key in ("samples", "seed")},
            "moments": MOMENTS,
            "batch": tuple(parity["batches"]),
            **{key: parity[key] for key in ("min_agreement", "max_error", "half_factor")},
            "output": "parity.json",
        },
    )


def bench(recipe: Recipe, target: Target) -> Invocation:
    wanted = recipe["bench"]
    return Invocation(
        command="bench",
        arguments=tuple(artefact_name(target, subject) for subject in SUBJECTS),
        options={
            **running_words(target, wanted["threads"]),
            "batch": tuple(wanted["batches"]),
            "images": SAMPLES,
            "time_limit": wanted["time_limit_s"],
            **{key: wanted[key] for key in ("half_width", "block_ms", "min_rounds")},
            "output": bench_name(recipe, target),
        },
    )


def gate(recipe: Recipe, root: Path, baseline: Baseline) -> Invocation:
    """`gate` judges one measurement and one proof; where there are more the stage itself does."""
    first, *others = recipe.targets
    if others or first.rules or parity_name(first) != "parity.json":
        return only_beside("gate", baseline, root)
    return Invocation(
        command="gate",
        arguments=(bench_name(recipe, first), "parity.json"),
        options={"fail_if": list(recipe["gate"]["fail_if"]), **_beside(baseline, root), "output": ["gate.json"]},
    )


def package(recipe: Recipe, root: Path) -> Invocation:
    options = {
        "name": recipe["package"]["name"],
        "model_version": 1,
        "labels": _path(recipe, "package", "labels", root),
        "output": "repository",
    }
    return Invocation(command="package", arguments=(".",), options=options)
