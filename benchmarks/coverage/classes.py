"""The chain of a small model of every class without a family: sites, errors with half removed, graphs against torch.

    python -m benchmarks.coverage.classes --output benchmarks/results/coverage_classes.json

Weights are random, with correlated channels. There are as many calibration inputs as the widest layer has columns, and
other inputs judge. A separate process measures each class. The record is written after every row; rows in the record
are measured again only if they match `--again`. Seconds are CPU seconds of one core.
"""

import fnmatch
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
import torch
from torch import fx, nn

from benchmarks.harness import Record
from corp_deploy.families.traced_model import sites_of, trace_model, tracing
from corp_deploy.machine import versions
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import inputs_for_model
from corp_deploy.traced.finding.flow import site_labels
from corp_deploy.traced.finding.sites import FoundSites
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.programs.tracing import trace

from .alone import Row, alone
from .chain import BATCH, DRAWS, JUDGED, PRESETS, Subject, graph_errors, needed
from .small import Small, dense, drawn, smalls

KIND, KEY = "benchmarks/coverage-classes", ("source", "class")
MOST_S, MOST_BYTES = 900, 12 * 2**30


def share_within(found: FoundSites) -> float:
    """Return the share of the multiply-adds within sites, by the removable share of each layer's rows or columns."""
    units, share = torch.zeros(found.flow.groups.count + 1, dtype=torch.bool), defaultdict[fx.Node, float](float)
    for site in found.sites:
        units[site_labels(found.flow, site)] = True
    for use in found.flow.every_use:
        share[use.node] = max(share[use.node], float(units[found.flow.groups.of(use.labels)].double().mean()))
    within = sum(found.costs[node] * of_node for node, of_node in share.items())
    return round(within) / max(sum(found.costs.values()), 1)


def measured(small: Small) -> Row:
    """Return the row of a class."""
    row: Row = {"source": small.source, "class": small.kind, "name": small.name}
    model = trace_model(dense(small, 0), _architecture(small))
    began = time.process_time()
    own = tracing(model)
    traced_at = time.process_time()
    found = own.analysis
    row |= {"trace_s": round(traced_at - began, 2), "find_s": round(time.process_time() - traced_at, 2)}
    offered = sites_of(model)
    row |= {
        "share": round(share_within(found), 3),
        "sites": dict(Counter(site.groups.kind for site in offered.every)),
        "refused": dict(Counter(refusal.reason for refusal in offered.refused)),
        "unknown": dict(found.flow.unknown),
        "inputs": needed(own),
    }
    with tempfile.TemporaryDirectory() as scratch:
        return row | _chained(small, model, row["inputs"], Path(scratch))


def _architecture(small: Small) -> Architecture:
    return Architecture(name=small.kind, family="module")


def _chained(small: Small, model: nn.Module, count: int, scratch: Path) -> Row:
    """Return identity, errors and graphs of a class.

    If `best` does not have the smallest error in the first draw, errors are means over several draws, since one network
    with random weights may favour any preset by chance.
    """
    subject = _subject(small, model, count, 0, scratch)
    half = _half(subject)
    draws = [_errors(subject, half)]
    if draws[0]["best"] > min(draws[0].values()):
        for seed in range(1, DRAWS):
            other = _subject(small, trace_model(dense(small, seed), _architecture(small)), count, seed, scratch)
            draws.append(_errors(other, _half(other)))
    return {
        "identity": subject.error(subject.reduced("best", 0.0)),
        "draws": len(draws),
        "errors": {preset: sum(each[preset] for each in draws) / len(draws) for preset in PRESETS},
        "graphs": graph_errors(subject, half["best"], scratch),
    }


def _subject(small: Small, model: nn.Module, count: int, seed: int, scratch: Path) -> Subject:
    """Return a calibrated model with the inputs that judge it."""
    for name, many, of in (("fitted", count, 2 * seed + 1), ("judged", JUDGED, 2 * seed + 2)):
        np.savez(scratch / f"{name}-{seed}.npz", **drawn(model, many, of))  # type: ignore[arg-type]
    fitted, judged = (inputs_for_model(model, scratch / f"{name}-{seed}.npz") for name in ("fitted", "judged"))
    has_pairs = any(isinstance(site, TracedPairs) for site in sites_of(model).every)
    checkpoint = Checkpoint(model=model, architecture=_architecture(small), lineage={})
    moments = calibrate(checkpoint, fitted, batch_size=BATCH, statistics=Statistics(attention_system=has_pairs))
    return Subject(checkpoint=checkpoint, moments=moments, judged=judged)


def _half(subject: Subject) -> dict[str, nn.Module]:
    return {preset: subject.reduced(preset, 0.5) for preset in PRESETS}


def _errors(subject: Subject, half: Mapping[str, nn.Module]) -> dict[str, float]:
    return {preset: subject.error(candidate) for preset, candidate in half.items()}


def warm() -> None:
    """Trace and export a tiny model, so that forked processes need no imports."""
    tiny, numbers = nn.Linear(2, 2), torch.zeros(2, 2)
    trace(tiny, [numbers])
    torch.onnx.export(tiny, (numbers,), dynamo=True, verbose=False)


def row_of(small: Small) -> Row:
    """Measure a class in a separate process, with limits of time and memory."""
    return {"source": small.source, "class": small.kind, "name": small.name} | alone(
        lambda: measured(small), most_s=MOST_S, most_bytes=MOST_BYTES
    )


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--classes", "pattern", default="*", show_default=True, help="Sources and classes that fit: timm/VGG.")
@click.option("--again", default="", help="Measure those that fit this pattern anew.")
def main(output: Path, pattern: str, again: str) -> None:
    torch.set_num_threads(1)
    warm()
    record = Record(output, KIND, {"versions": versions()})
    for small in smalls():
        name = f"{small.source}/{small.kind}"
        is_there = record.has("rows", {"source": small.source, "class": small.kind})
        if fnmatch.fnmatchcase(name, pattern) and (not is_there or fnmatch.fnmatchcase(name, again)):
            row = row_of(small)
            record.put("rows", row, KEY)
            click.echo(" ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
