"""Which sites a traced program has, for names of timm or one small model of each of its classes; no weights.

    python -m benchmarks.coverage.find vit_tiny_patch16_224 resnet50
    python -m benchmarks.coverage.find --classes --output build/find.json

A row has the seconds to trace and to find, the sites by kind, the share of the multiply-adds that are within sites and
the ops that no rule knows. With --narrow half of every site goes, with random weights, and the narrowed program is held
beside the dense one whose removed elements are zeroed.
"""

import fnmatch
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import timm
import torch
from torch import nn

from benchmarks.real.record import Record
from corp_deploy.machine import versions
from corp_deploy.traced.finding.choice import gone
from corp_deploy.traced.finding.site import Site
from corp_deploy.traced.finding.sites import Found, find
from corp_deploy.traced.narrowing.narrow import narrow
from corp_deploy.traced.narrowing.proof import difference
from corp_deploy.traced.programs.tracing import trace
from ground.errors import BadInput

KIND, KEY = "benchmarks/coverage-find", ("name",)


def built(name: str, *, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch of two of its inputs."""
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = timm.create_model(name).eval()
        config: Any = model.pretrained_cfg
        return model, torch.randn(2, *config["input_size"])


def smallest() -> Iterator[str]:
    """The name of the model with the fewest parameters of each class."""
    best: dict[str, tuple[int, str]] = {}
    for name in timm.list_models():
        model, _ = built(name, device="meta")
        count = sum(each.numel() for each in model.parameters())
        best[type(model).__name__] = min(best.get(type(model).__name__, (count, name)), (count, name))
    yield from (name for _, name in sorted(best.values()))


def half(site: Site) -> list[int]:
    """Any half of each part."""
    parts = np.zeros(site.size, dtype=int) if site.part_G is None else site.part_G
    draw = np.random.default_rng(0)
    groups = [draw.permutation(np.flatnonzero(parts == part)) for part in range(site.parts)]
    return [int(each) for of_part in groups for each in of_part[: max(1, len(of_part) // 2)]]


def row_of(name: str, *, narrows: bool) -> dict[str, Any]:
    """What is found, or why nothing can be."""
    torch.manual_seed(0)
    model, images = built(name, device="cpu" if narrows else "meta")
    row: dict[str, Any] = {"name": name, "class": type(model).__name__}
    began = time.perf_counter()
    try:
        program = trace(model, (images,))
    except BadInput as error:
        return row | {"refused": str(error)}
    traced = time.perf_counter()
    found = find(program)
    row |= {
        "trace_s": round(traced - began, 2),
        "find_s": round(time.perf_counter() - traced, 2),
        "any_batch": program.any_batch,
        "sites": dict(Counter(site.kind for site in found.sites)),
        "macs_share": round(found.macs_within / max(found.macs, 1), 3),
        "unknown": found.unknown,
    }
    return row | (narrowed(found, images) if narrows else {})


def narrowed(found: Found, images: torch.Tensor) -> dict[str, Any]:
    began = time.perf_counter()
    given = narrow(found, {site.key: half(site) for site in found.sites})
    took = time.perf_counter() - began
    apart = difference(found, gone(found.flow, found.sites, given.kept), given.module, (images,))
    return {"narrow_s": round(took, 2), "whole": dict(given.whole), "difference": apart}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--classes", is_flag=True, help="The smallest model of each class.")
@click.option("--every", default="", help="All names that fit this pattern.")
@click.option("--narrow", "narrows", is_flag=True, help="Narrow every site by half, with random weights.")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="A record that rows are added to."
)
def main(names: tuple[str, ...], classes: bool, every: str, narrows: bool, output: Path | None) -> None:
    torch.set_num_threads(1)
    record = None if output is None else Record(output, KIND, {"versions": versions()})
    matching = fnmatch.filter(timm.list_models(), every) if every else []
    for name in (*names, *(smallest() if classes else ()), *matching):
        if record is not None and record.has("rows", {"name": name}):
            continue
        try:
            row = row_of(name, narrows=narrows)
        except Exception as error:
            row = {"name": name, "failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        click.echo(" ".join(f"{key}={value}" for key, value in row.items()))
        if record is not None:
            record.put("rows", row, KEY)


if __name__ == "__main__":
    main()
