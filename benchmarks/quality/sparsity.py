"""2:4 sparsity against narrower layers at equal multiply-adds, on three trained models (see subjects.py).

    python -m benchmarks.quality.sparsity --output benchmarks/results/sparsity.json

The multiply-adds of 2:4 rows are nominal: half of the sparse layers', as if every kernel skipped its zeros. Errors are
of the outputs (logits, pooled outputs or class tokens), relative to the centred dense outputs.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import BATCH, SUBJECTS, Subject
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.reduction.sparsify import Sparsifying, sparsify
from corp_deploy.spec.sparsity import KINDS, Sparsity

TWO_OF_FOUR = Sparsifying(kinds=dict.fromkeys(KINDS, Sparsity(kept=2, of=4)))
MASK_ONLY = replace(TWO_OF_FOUR, refits=False)
NARROWER = 0.3  # of widths, before 2:4
SIZES = {"digits": (512, 500), "MiniLM": (160, 60), "DINOv2-S": (32, 32)}
SPARSE, NARROW_SPARSE = "2:4", "widths 70 %, then 2:4"
SPARSE_WAYS: Mapping[str, Sparsifying] = {
    SPARSE: TWO_OF_FOUR,
    "2:4, largest weights, mask only": replace(MASK_ONLY, rule="magnitude"),
    "2:4, CAST's cost, mask only": replace(MASK_ONLY, rule="cast"),
    "2:4, largest weights, refit": replace(TWO_OF_FOUR, rule="magnitude"),
    "2:4, CAST's cost, refit": replace(TWO_OF_FOUR, rule="cast"),
    "2:4, inputs reordered": replace(TWO_OF_FOUR, permute="inside"),
    "2:4, fitted to the sparse stream's own": replace(TWO_OF_FOUR, target="own"),
}


def method_at(sparsity: float) -> Method:
    """Return preset best with the same share of every width removed."""
    widths = {"mlp_sparsity": sparsity, "attention_sparsity": sparsity}
    return method_from_preset("best", **widths, align_hidden=8, align_head=4, geometry="square")


def at_share(model: nn.Module, share: float) -> Method:
    """Return a method at the least sparsity, in steps of 1 %, that leaves at most this share of the multiply-adds."""
    costs, whole = site_costs(model, "macs"), macs(model)
    for percent in range(1, 97):
        method = method_at(percent / 100)
        if 1 - costs.saved(sites_of(model).every, uniform_widths(model, method)) / whole <= share:
            return method
    raise click.ClickException(f"no widths leave {share:.0%} of the multiply-adds")


def narrower(subject: Subject, method: Method, *, loop: bool) -> nn.Module:
    """Return the model with narrower layers."""
    if loop:
        return reduce_traced(subject.dense.model, subject.inputs, method, loop=Loop()).model
    return reduce(subject.dense.model, subject.moments, method).model


def row_of(subject: Callable[[], Subject], made: Callable[[Subject], tuple[nn.Module, int]]) -> dict[str, Any]:
    """Judge one model; `made` returns the model and the multiply-adds of its zeros."""
    own = subject()
    started = time.perf_counter()
    model, zeros = made(own)
    seconds = time.perf_counter() - started
    share = (macs(model) - zeros) / macs(own.dense.model)
    sizes = dict(zip(("fitted", "held_out"), SIZES[own.name], strict=True))
    return {"macs_share": share, "error": own.error(model), "seconds": seconds, **sizes}


def sparse(how: Sparsifying, of_widths: float, subject: Subject) -> tuple[nn.Module, int]:
    """Make weights sparse, after a share of the widths was removed if one is given."""
    dense = subject.dense.model
    model = narrower(subject, method_at(of_widths), loop=True) if of_widths else dense
    result, report = sparsify(model, subject.inputs, how, batch_size=BATCH)
    return result, report.macs_of_zeros


def structured(share: float, loop: bool, subject: Subject) -> tuple[nn.Module, int]:
    """Make layers narrower until at most this share of the multiply-adds is left."""
    return narrower(subject, at_share(subject.dense.model, share), loop=loop), 0


def measure(bench: Bench, name: str, subject: Callable[[], Subject]) -> None:
    """Make all rows of one model; narrower layers have the multiply-adds of sparse ones."""

    def row(method: str, made: Callable[[Subject], tuple[nn.Module, int]]) -> None:
        bench.row({"model": name, "method": method}, row_of, subject, made)

    def narrow_like(method: str, other: str, *, loop: bool) -> None:
        if bench.record.has("rows", {"model": name, "method": other}):
            share = bench.record.row("rows", {"model": name, "method": other})["macs_share"]
            row(method, partial(structured, share, loop))

    for method, how in SPARSE_WAYS.items():
        row(method, partial(sparse, how, 0.0))
    narrow_like("widths at the MACs of 2:4, closed loop", SPARSE, loop=True)
    narrow_like("widths at the MACs of 2:4", SPARSE, loop=False)
    row(NARROW_SPARSE, partial(sparse, TWO_OF_FOUR, NARROWER))
    narrow_like("widths at the MACs of both, closed loop", NARROW_SPARSE, loop=True)


@measures("benchmarks/sparsity")
def main(bench: Bench) -> None:
    """Measure and write the record."""
    for name, sizes in SIZES.items():
        with tempfile.TemporaryDirectory() as scratch:
            measure(bench, name, cache(partial(SUBJECTS[name], Path(scratch), *sizes)))


if __name__ == "__main__":
    main()
