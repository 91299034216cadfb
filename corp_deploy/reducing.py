"""Reduce a checkpoint as a command asks for it, and write the smaller model with its lineage."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from calib.images import Images
from calib.moments import Moments
from calib.store import load as load_moments
from perf.summary import summarise
from perf.timing import Plan

from . import budget as budgets
from .checkpoint import Checkpoint, save
from .choices import Choices, Widths
from .closed_loop import reduce_closed_loop
from .errors import BadInput
from .files import sha256_of_file
from .head_choice import choose_heads
from .inputs import model_digest
from .latency_grid import Where, measure_tables, offers_in_time
from .reduce import Reduction, SiteReport, reduce, require_same_model
from .side_by_side import measure

PROBE_IMAGES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A share of the dense model's MACs, parameters or latency that may stay, in (0, 1]; `where` tells latency's."""

    currency: Literal["macs", "params", "latency"]
    share: float
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A reduction as a user asks for it. Images are needed for a budget, for `auto_heads` and for the closed loop."""

    preset: str
    choices: Choices
    budget: Budget | None = None
    auto_heads: bool = False
    closed_loop: bool = False

    @property
    def needs_images(self) -> bool:
        return self.budget is not None or self.auto_heads or self.closed_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Choices and widths settled (None: uniform), with a sentence on each thing that was decided."""

    choices: Choices
    widths: Widths | None
    said: tuple[str, ...]
    predicted_speedup: float | None = None


def _probe(dense: Checkpoint, moments: Moments, choices: Choices, images: Images) -> budgets.Probe:
    pixels = next(iter(images.batches(min(PROBE_IMAGES, images.count))))
    known = budgets.eliminations(dense.model, moments, choices)
    return budgets.Probe(model=dense.model, moments=moments, choices=choices, images=pixels, eliminations=known)


def _allocated_in_time(dense: Checkpoint, probe: budgets.Probe, budget: Budget) -> Planned:
    where = budget.where
    assert where is not None, budget
    tables = measure_tables(dense, probe.choices, where)
    batch = where.batches[0]
    sites, total = offers_in_time(list(budgets.offers(probe, "macs")), tables, dense, probe.choices, batch)
    found = budgets.spend(sites, total, budget.share)
    said = (
        f"budget: {found.share:.1%} of the dense latency predicted of {budget.share:.1%} allowed, which is "
        f"{found.share * total / 1e6:.3f} of {total / 1e6:.3f} ms at batch {batch} in {where.backend}; predicted logit "
        f"error {found.predicted_error:.4f}"
    )
    return Planned(choices=probe.choices, widths=found.widths, said=(said,), predicted_speedup=1.0 / found.share)


def _allocated(probe: budgets.Probe, budget: Budget) -> Planned:
    assert budget.currency != "latency", budget
    dense = budgets.dense_cost(probe.model, budget.currency)
    sites = list(budgets.offers(probe, budget.currency))
    found = budgets.spend(sites, dense, budget.share)
    uniform = budgets.uniform_for_share(probe.model, probe.choices, sites, dense, budget.share)
    said = (
        f"budget: {found.share:.1%} of the dense {budget.currency} used of {budget.share:.1%} allowed, predicted logit "
        f"error {found.predicted_error:.4f}; the same budget at uniform widths is sparsity {uniform.mlp_sparsity:.2f}"
    )
    return Planned(choices=probe.choices, widths=found.widths, said=(said,))


def plan(dense: Checkpoint, moments: Moments, asked: Asked, images: Images | None) -> Planned:
    """Settle geometry and widths. Raises BadInput when images are needed and missing."""
    if asked.needs_images and images is None:
        raise BadInput("a budget, --heads auto and --closed-loop look at real images; give them with --images")
    if images is None or not (asked.budget or asked.auto_heads):
        return Planned(choices=asked.choices, widths=None, said=())
    probe = _probe(dense, moments, asked.choices, images)
    if asked.auto_heads:
        if asked.budget is not None and asked.budget.currency != "macs":
            raise BadInput("--heads auto compares at equal MACs; expected --macs, or no budget")
        taken = choose_heads(probe, None if asked.budget is None else asked.budget.share)
        return Planned(choices=taken.choices, widths=taken.allocated.widths, said=(taken.reason,))
    assert asked.budget is not None
    if asked.budget.currency == "latency":
        return _allocated_in_time(dense, probe, asked.budget)
    return _allocated(probe, asked.budget)


def reduced_checkpoint(dense: Checkpoint, reduction: Reduction, *, preset: str, moments: Path) -> Checkpoint:
    """The reduced model with what led to it."""
    carried = load_moments(moments).lineage
    lineage = {
        "dense": model_digest(dense.model),
        "moments": sha256_of_file(moments),
        "images": carried["images"],
        "preprocessing": carried["preprocessing"],
        "preset": preset,
        "reduction": reduction.as_json(),
    }
    return Checkpoint(model=reduction.model, architecture=dense.architecture, lineage=lineage)


def reduce_as_asked(
    dense: Checkpoint,
    moments: Moments,
    asked: Asked,
    *,
    images: Images | None = None,
    done: Callable[[int], None] | None = None,
) -> tuple[Reduction, Planned]:
    """Plan, then reduce in one pass over the moments or in the closed loop over the images."""
    require_same_model(dense.model, moments)
    with torch.inference_mode():
        planned = plan(dense, moments, asked, images)
    if asked.closed_loop:
        assert images is not None
        return reduce_closed_loop(dense.model, images, planned.choices, widths=planned.widths, done=done), planned
    return reduce(dense.model, moments, planned.choices, widths=planned.widths, done=done), planned


def reduce_checkpoint(
    dense: Checkpoint,
    moments: Path,
    asked: Asked,
    *,
    directory: Path,
    images: Images | None = None,
    done: Callable[[int], None] | None = None,
) -> tuple[Reduction, Planned]:
    """Reduce and write; nothing is written unless all of it succeeds."""
    reduction, planned = reduce_as_asked(dense, load_moments(moments), asked, images=images, done=done)
    save(reduced_checkpoint(dense, reduction, preset=asked.preset, moments=moments), directory)
    return reduction, planned


def measured_speedup(dense: Checkpoint, directory: Path, batch: int) -> float:
    """Dense over reduced median latency in ONNX Runtime, interleaved, to hold a prediction against."""
    with tempfile.TemporaryDirectory() as scratch:
        save(dense, Path(scratch))
        bench = measure(Path(scratch), directory, batches=(batch,), plan=Plan(time_limit_s=5.0, noise_rounds=0))
    (row,) = summarise(bench).rows
    assert row.speedup is not None, row
    return row.speedup.value


def record_of_reduction(reduction: Reduction, planned: Planned) -> dict[str, Any]:
    """The reduction and what was decided for it, as JSON values."""
    return reduction.as_json() | {"decided": list(planned.said)}


def site_table(sites: Sequence[SiteReport]) -> Table:
    """Per site: width asked and got, and the share of the dense signal lost without and with the repair."""
    table = Table("site", "part", "dense", "asked", "got", "lost without repair", "lost", "condition")
    for site in sites:
        energy = site.energy or 1.0
        table.add_row(
            site.site,
            site.part,
            str(site.width_dense),
            f"{site.width_asked:g}",
            str(site.width),
            f"{site.error_uncompensated / energy:.2%}",
            f"{site.error / energy:.3%}",
            f"{site.condition:.1e}",
        )
    return table
