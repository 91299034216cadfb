"""Errors of DINOv2-S at 0.8 of the MACs by the numbers of calibration photographs and of crops.

    make real
    python -m benchmarks.real.more_data --output benchmarks/results/more_data.json

Errors are of the class token on held-out crops, of the 16 photographs that judge every record and of 30 of another
kind, and on the first 256 calibration crops. Quick and standard effort narrow MLPs, queries and keys; merged tokens are
chosen together with widths, at quick effort.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import Subject, crops_of, dinov2, outputs, relative_errors
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from ground.errors import Missing

HOW: Mapping[str, Mapping[str, Any]] = {
    "quick": {"effort": "quick"},
    "merged tokens": {"effort": "quick", "merge_tokens": "auto"},
    "standard": {"effort": "standard"},
}
SHARE, OWN = 0.8, 256
LARGE, EVERY = 37, 297
SIZES: Mapping[tuple[int, int], tuple[str, ...]] = {
    (LARGE, 512): tuple(HOW),
    (EVERY, 512): tuple(HOW),
    (EVERY, 1536): tuple(HOW),
    (LARGE, 1536): ("quick",),
    (EVERY, 4096): ("quick",),
}
"""Numbers of photographs and crops, with the efforts to try: 4,096 crops at standard effort would take two hours."""


def row_of(subject: Callable[[], Subject], known: dict[str, Tensor], how: str) -> dict[str, Any]:
    """Make one reduction and judge it on each set; `known` keeps the dense outputs by set."""
    own = subject()
    moments, started = own.moments, time.process_time()
    asked = build_request(ReduceOptions.from_options({"macs": SHARE, **HOW[how]}))
    reduction, _ = reduce_as_asked(own.dense, moments, asked, images=own.inputs)
    cpu_s = time.process_time() - started
    assert own.more_held_out is not None
    fitted = own.inputs.subset(range(min(own.inputs.count, OWN)))
    sets = {"": own.held_out, "more_": own.more_held_out, "fitted_": fitted}
    if not known:
        known |= {name: outputs(own.dense.model, each) for name, each in sets.items()}
    found = {name: relative_errors(outputs(reduction.model, each), known[name]) for name, each in sets.items()}
    errors = {f"{name}error": error for name, (error, _) in found.items()}
    medians = {f"{name}median_error": median for name, (_, median) in found.items()}
    return {**errors, **medians, "macs_share": macs(reduction.model) / macs(own.dense.model), "cpu_s": cpu_s}


@measures("benchmarks/more-data")
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="Crops to judge by.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(bench: Bench, held_out: int, threads: int) -> None:
    """Reduce by each effort from each set of crops."""
    torch.set_num_threads(threads)
    bench.share(threads=threads, held_out=held_out, share=SHARE)
    for (photographs, count), every in SIZES.items():
        with tempfile.TemporaryDirectory() as scratch:
            make = partial(dinov2, Path(scratch), count, held_out)
            subject = cache(lambda make=make, count=count, used=photographs: make(crops_of(count, used)))
            known = dict[str, Tensor]()
            for how in every:
                try:
                    bench.row({"how": how, "photographs": photographs, "crops": count}, row_of, subject, known, how)
                except Missing as reason:
                    click.echo(f"skipped: {reason}")
                    return


if __name__ == "__main__":
    main()
