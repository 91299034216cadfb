"""Checks that open the model, images, labels and heads that a recipe names, as the stages will.

Only the first images are decoded and run. Imports torch.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from calib.fingerprints import no_ids
from calib.images import Images
from calib.splits import Split, split_for_calibration
from calib.store import load_moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import output_ports
from corp_deploy.planning.refusals import refuse_unfit
from corp_deploy.planning.request import build_request
from corp_deploy.proof.heads import open_heads
from corp_deploy.proof.limits import ParityLimits, unreachable_shares
from corp_deploy.reduction.steady_inputs import require_steady_on
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.input_sets import images_for_model, left_out
from corp_deploy.store.labels import labels_for
from corp_deploy.store.onnx_file import graph_ports
from export.graph.precision import kept_modules
from export.graph.to_onnx import require_size
from export.triton.variants import require_labels
from ground.errors import BadInput
from ground.outputs import require_space
from ground.ports import OutputPort
from ground.precision import type_by_name
from perf.bench.latency_table import SUFFIX, load_table
from perf.gate.rule import ACCURACY, FITTED
from perf.parity.measures import MEASURES, SHARES, require_agreement
from perf.record.runs import FittedInputs

from .incremental import Stage
from .names import MOMENTS, PARITY, parity_name
from .recipe import Recipe
from .recipe_keys import RecipeProblems
from .recipe_tables import require_more
from .serving import read_class_names

PROVING = {"size", "samples", "parity"}
"""The stages that open the images that prove the result."""


def _calibration_images(
    recipe: Recipe, model: nn.Module, mistakes: RecipeProblems, warn: Callable[[str], None]
) -> Split[Images] | None:
    """Return the calibration images, split as the calibration will split them; None after noting a mistake."""
    table, images = recipe.calibration, None
    with mistakes.at("calibration.images"):
        images = images_for_model(model, table.images, samples=table.samples, seed=table.seed, max_bad=table.max_bad)
    if images is None:
        return None
    if images.skipped:
        warn(f"calibration.images: {left_out(table.images, images)}")
    if recipe.export.quantised and recipe.range_samples > images.available:
        mistakes.add(
            f"export.range_samples: the ranges of {', '.join(recipe.export.quantised)} are computed from "
            f"{recipe.range_samples} of calibration.images, which are {images.available}; write range_samples = "
            f"{images.available} or fewer under [export]"
        )
    key = "group_labels" if table.group_labels else "groups" if table.groups else "hold_out"
    with mistakes.at(f"calibration.{key}"):
        parts = split_for_calibration(images, hold_out=table.hold_out, groups=table.grouping, seed=table.seed)
        with mistakes.at():
            if table.snapshots:
                require_more(parts.fitted.count, table.snapshots)
        return parts
    return None


def _read_proof(
    recipe: Recipe, model: nn.Module, proving: Images, mistakes: RecipeProblems, warn: Callable[[str], None]
) -> None:
    if recipe.held_out.labels is not None:
        with mistakes.at("held_out.labels"):
            labels_for(recipe.held_out.labels, proving, model, warn)
    limits, ports = ParityLimits.from_options(recipe.parity.values), output_ports(model)
    with mistakes.at("[parity]"):
        for port in ports:
            if limits.of_port(port).min_agreement is not None:
                require_agreement(port, proving.count)
    with mistakes.at("parity.head"), open_heads(tuple(map(Path, recipe.parity.heads)), ports) as heads:
        every = [*ports, *heads.ports]
        with mistakes.at("[parity]"):
            limits.require_applied(every)
        with mistakes.at("gate.fail_if"):
            _require_figures(recipe, every)


def _require_figures(recipe: Recipe, ports: Sequence[OutputPort]) -> None:
    """Raise BadInput for a rule on a figure that no output of the model has, or on accuracy without labels."""
    known = {each.name for port in ports for each in fields(MEASURES[port.role])} | {FITTED, ACCURACY}
    for rule in (*recipe.rules, *(rule for target in recipe.targets for rule in target.rules)):
        if rule.is_own or rule.is_of_bench:
            continue
        if rule.metric not in known:
            gives = ", ".join(f"{port.name} ({port.role})" for port in ports)
            raise BadInput(f"rule {rule.text!r}: no output has {rule.metric}, since the model gives {gives}")
        if rule.metric == ACCURACY and recipe.held_out.labels is None:
            raise BadInput(f"rule {rule.text!r}: accuracy needs labels of held-out images; give held_out.labels")


def _check_class_names(path: Path, model: nn.Module) -> None:
    names, classes = read_class_names(path), traced_model.classes(model)
    require_labels(names, where=str(path))
    if not classes:
        raise BadInput(f"{path}: labels name classes, and the model tells none apart; leave them out")
    if len(names) != classes:
        raise BadInput(f"{path}: {len(names)} labels for the model's {classes} classes; give one for each, a line each")


def _bytes_to_write(recipe: Recipe, model: nn.Module, names: Collection[str]) -> float:
    """Estimate the bytes that the stages `names` write, with half of the dense model's bytes for the reduced one."""
    graphs = sum(1.0 if type_by_name(each).size_bytes == 4 else 0.5 for each in recipe.export.precisions)
    shares = {"dense": 1.0, "reduce": 0.5, "export.dense": graphs, "export.reduced": graphs / 2, "package": graphs / 2}
    return sum(each.nbytes for each in model.parameters()) * sum(shares.get(name, 0.0) for name in names)


def read_inputs(
    recipe: Recipe, root: Path, stages: Sequence[Stage], mistakes: RecipeProblems, warn: Callable[[str], None]
) -> None:
    """Add to `mistakes` those that `stages` would find in inputs outside the release; pass their warnings to `warn`.

    The model is that of the recipe, or the saved one if the stage `dense` is done. Raises Missing for a full disk.
    """
    names, labels = {stage.name for stage in stages}, {label for stage in stages for label in stage.outside}
    dense: Checkpoint | None = None
    with mistakes.at("[model]"):
        dense = recipe.model.opened() if "dense" in names else load_checkpoint(root / "dense")
    if dense is None:
        return
    model = dense.model
    require_space(root, _bytes_to_write(recipe, model, names), what="the models and graphs take")
    if "dense" in names:
        with mistakes.at("export.input"):
            graph_ports(dense, recipe.export.graph_input)
    if "reduce" in names:
        with mistakes.at("[reduce]"):
            refuse_unfit(dense, build_request(recipe.reduce))
        tables = recipe.reduce.latency_tables
        for path in () if tables is None else sorted(Path(tables).glob(f"*{SUFFIX}")):
            with mistakes.at("reduce.latency_tables"):
                load_table(path)
    if "export.dense" in names:
        with mistakes.at("export.precisions"):
            for precision in recipe.export.precisions:
                require_size(model, precision)
    if "export.dense" in names and recipe.export.keep_fp32:
        with mistakes.at("[export]"):
            kept_modules(traced_model.exportable(model), recipe.export.keep_fp32)
    calibration = _calibration_images(recipe, model, mistakes, warn) if "calibration.images" in labels else None
    if "moments" in names and calibration is not None:
        with mistakes.at("[model]"):
            require_steady_on(model, calibration.fitted)
    proving = calibration.held_out if recipe.proves_on_calibration and calibration is not None else None
    if names & PROVING and not recipe.proves_on_calibration:
        with mistakes.at("held_out.images"):
            proving = recipe.proof_images.proving_images(model, lambda text: warn(f"held_out.images: {text}"))
    if names & PROVING and proving is not None:
        _read_proof(recipe, model, proving, mistakes, warn)
        for sentence in limits_out_of_reach(recipe, proving.count):
            warn(sentence)
        if calibration is not None:  # otherwise the calibration is done, and its moments know the images
            fitted_ids = calibration.fitted.ids
        else:
            fitted_ids = load_moments(root / MOMENTS).image_ids if (root / MOMENTS).is_file() else no_ids()
        fitted = FittedInputs(judging=proving.count, same=int(torch.isin(proving.ids, fitted_ids).sum()))
        if fitted.has_overlap:
            warn(f"held_out.images: {fitted.warning}; the gate fails unless a rule on {FITTED} allows it")
    if "package.labels" in labels and recipe.package.labels is not None:
        with mistakes.at("package.labels"):
            _check_class_names(recipe.package.labels, model)


def limits_out_of_reach(recipe: Recipe, held_out: int) -> list[str]:
    """Return a sentence for each limit that `held_out` images are too few to show, even if all of them agree."""
    parity, limits = recipe.parity, {f"parity.{name}": least for name, least in recipe.parity.shares.items()}
    sentences = unreachable_shares(limits, count=held_out, noun="held-out images", confidence=parity.confidence)
    for target in recipe.targets:
        rules = (*(recipe.rules if target == recipe.targets[0] else ()), *target.rules)
        count = held_out if parity_name(target) == PARITY else min(held_out, recipe.samples.count)
        # Only rules that forbid a share below a number: the bound of a baseline isn't known yet.
        shares = {
            f"rule {rule.text!r}: {rule.metric}": rule.offset
            for rule in rules
            if rule.metric in SHARES and not rule.is_own and rule.name is None and rule.compare in ("<", "<=")
        }
        sentences += unreachable_shares(shares, count=count, noun="images", confidence=recipe.gate.confidence)
    return sentences
