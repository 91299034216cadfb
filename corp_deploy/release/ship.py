"""The recipe that `ship` writes for a model and a folder of images. Torch is imported to open these."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corp_deploy.invocation.budget_choice import MACS, BudgetChoice
from corp_deploy.invocation.calibration import PassOptions
from corp_deploy.invocation.engine import MOST_HELD_OUT, ShipOptions, TargetName
from corp_deploy.invocation.input_choice import Drawn
from corp_deploy.invocation.option import Invocation
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.invocation.source import ModelSource
from ground.errors import BadInput

from .baseline import Baseline
from .names import RECIPE
from .recipe import SECTIONS, Recipe
from .recipe_file import is_inside, load_recipe, model_table, paths_in_tables
from .recipe_keys import record_of, values_of
from .recipe_tables import TargetTable
from .run import Job
from .targets import missing_to_run

LEAST_IMAGES = 16
BY_SPEED: tuple[TargetName, ...] = ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda", "onnxruntime-cpu")
"""The targets that `ship` tries, in this order; without any of them it takes the last and says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipRequest:
    """The model and the options of one run of `ship`."""

    source: ModelSource
    options: ShipOptions
    drawn: Drawn
    budget: BudgetChoice
    timed: BenchOptions
    run: PassOptions

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        held_out, labels, tables = self.options.held_out, self.options.labels, self.budget.latency_tables
        return {
            "model": values_of(model_table(self.source)),
            "calibration": {"images": self.options.images.resolve(), **self.drawn.drawn, "device": self.run.device},
            "held_out": {"images": held_out and held_out.resolve(), "labels": labels and labels.resolve()},
            "reduce": {
                "macs": self.budget.macs if self.budget.allocates else MACS,
                "params": self.budget.params,
                "latency": self.budget.latency,
                "within": None if self.budget.limit is None else str(self.budget.limit),
                "latency_tables": tables and Path(tables).resolve(),
            },
            "export": {"precisions": self.options.precision},
            "bench": {
                "batches": self.timed.batches,
                "time_limit_s": self.timed.time_limit,
                "launches": self.timed.launches,
            },
        }


def recipe_to_ship(request: ShipRequest, root: Path) -> Recipe:
    """Return the recipe in the directory `root` if it agrees with the request, or a new one if there is no recipe.

    Raises BadInput for a recipe of another release, for one with paths out of the directory that no option names, for a
    model that can't be opened, and for too few images to hold some out.
    """
    path = root / RECIPE
    if not path.exists():
        return _new(request, root)
    recipe, here = load_recipe(path, trust_paths=True), root.resolve()
    if others := list(_differences(request, recipe)):
        raise BadInput(
            f"{path}: is the recipe of another release: {'; '.join(others)}; change it there and run "
            f"`{rerun_command(recipe, root)}`, or give another --output"
        )
    named = {place for _, place in paths_in_tables(request.tables)}
    for name, place in paths_in_tables({name: values_of(getattr(recipe, name)) for name in SECTIONS}):
        if place not in named and not is_inside(place, here):
            raise BadInput(
                f"{path}: {name} leads out of {here}, to {str(place)[:200]}, which no option names; look at it, and "
                f"run `{rerun_command(recipe, root)}` if it may"
            )
    return recipe


@contextmanager
def job_to_ship(request: ShipRequest, root: Path, warn: Callable[[str], None]) -> Iterator[Job]:
    """Yield the job of a request in the directory `root`, whose lock the caller holds; raise as recipe_to_ship does.

    A BadInput raised within names the recipe only if it is written, since an earlier refusal is about the request.
    """
    path = root / RECIPE
    job = Job(recipe=recipe_to_ship(request, root), path=path, root=root, baseline=Baseline(), warn=warn)
    try:
        yield job
    except BadInput as error:
        words = str(error) if path.exists() else str(error).replace(f"{path.resolve()}: ", "")
        raise BadInput(words) from error


def _differences(request: ShipRequest, recipe: Recipe) -> Iterator[str]:
    for section, keys in request.tables.items():
        of_recipe, wanted = (
            values_of(each) for each in (getattr(recipe, section), record_of(SECTIONS[section], section, keys))
        )
        for key in keys:
            there, here = of_recipe[key], wanted[key]
            if there != here:
                words = ["not set" if value is None else str(value)[:200] for value in (there, here)]
                yield f"{section}.{key} is {words[0]} there, {words[1]} here"
    (first, *_), target = recipe.target_tables, request.options.target
    if target not in (None, first):
        yield f"the first of targets is {first} there, {target} here"


def rerun_command(recipe: Recipe, root: Path) -> Invocation:
    options = {"output": str(root), **recipe.trust(measures=True)}
    return Invocation(command="release", arguments=(str(root / RECIPE),), options=options)


def _new(request: ShipRequest, root: Path) -> Recipe:
    from corp_deploy.families import traced_model
    from corp_deploy.families.family import output_ports
    from corp_deploy.store.input_sets import images_for_model

    limit, held_out = request.budget.limit, request.options.held_out
    if limit is not None and held_out is None:
        raise BadInput(
            f"--within '{limit}' chooses the model on images held out of --images, so that they can't prove it too; "
            "give others as --held-out"
        )
    model = request.source.opened().model
    if (takes := traced_model.input_spec(model).medium) != "images":
        raise BadInput(
            f"{request.source.name}: takes {takes}, and a release needs a model of images; go step by step: "
            "calibrate, reduce, export, verify, bench, gate"
        )
    images = images_for_model(model, request.options.images, **request.drawn.drawn)
    count = len(images.ids.unique())  # copies stay on one side
    if (held_out is None or limit is not None) and count < LEAST_IMAGES:
        what, remedy = ("choose", "") if limit is not None else ("prove", ", or others as --held-out")
        found = f"{images.count} images" + f", copies of {count} different ones" * (count < images.count)
        raise BadInput(
            f"--images {request.options.images}: {found}, too few to hold some out that {what} the result; give "
            f"{LEAST_IMAGES} or more different ones{remedy}"
        )
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", root.resolve().name).lstrip("_.-") or "model"
    # A single logit may not tell two classes apart, so its error is judged instead.
    classifies = all(port.role == "logits" for port in output_ports(model)) and traced_model.classes(model) > 1
    rules = (f"speedup@b{max(request.timed.batches)} < 1.0", "top1_agreement < 0.98")
    own: Mapping[str, dict[str, Any]] = {
        "release": {"name": name},
        "package": {"name": name if "fp32" in request.options.precision else None},
        "calibration": {"hold_out": min(MOST_HELD_OUT, count // 2) if held_out is None or limit is not None else None},
        "reduce": {"effort": "standard"} if limit is None else {},
        "parity": {"min_agreement": 0.98 if classifies else None, "max_error": 0.05},
        "gate": {"fail_if": rules if classifies else rules[:1]},
    }
    tables = request.tables
    sections: dict[str, Any] = {
        name: record_of(kind, name, {**tables.get(name, {}), **own.get(name, {})}) for name, kind in SECTIONS.items()
    }
    recipe = Recipe(**sections, target_tables={request.options.target or BY_SPEED[-1]: TargetTable()})
    faster = () if request.options.target else BY_SPEED[:-1]
    others = (replace(recipe, target_tables={name: TargetTable()}) for name in faster)
    return next((each for each in others if missing_to_run(each.targets[0]) is None), recipe)
