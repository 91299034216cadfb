"""Errors and costs of `reduce --effort` on three pretrained models.

    python -m benchmarks.real.efforts --output benchmarks/results/efforts.json

DINOv2-S and EfficientNet-Lite0 on crops of photographs have budgets of MACs; the text encoder MiniLM loses half of
every MLP and of queries and keys (see benchmarks/quality/subjects.py). Errors are of held-out inputs. Passes are bare
forward passes over the calibration inputs, in CPU seconds of the same process.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import HELD_OUT_TEXTS, SUBJECTS, TEXTS, Subject, outputs, relative_errors
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request

EFFORTS = ("quick", "standard")


def _budgets(*shares: float, **options: Any) -> dict[str, dict[str, Any]]:
    merged = ", tokens merged" * ("merge_tokens" in options)
    return {f"{share:g} of the MACs{merged}": {"macs": share, **options} for share in shares}


ASKED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "DINOv2-S": _budgets(0.8) | _budgets(0.8, 0.7, 0.6, 0.5, merge_tokens="auto"),
    "EfficientNet-Lite0": _budgets(0.8, 0.66, 0.5, align={"mlp": 64, "head": 16, "conv": 8}),
    "MiniLM": {"half of all": {"mlp": 0.5, "attn": 0.5, "align": {"mlp": 8, "head": 8, "conv": 32}}},
}


def row_of(subject: Callable[[], Subject], options: Mapping[str, Any]) -> dict[str, Any]:
    """Make one reduction and judge it."""
    own = subject()
    dense, moments, pass_s = own.dense.model, own.moments, own.pass_s
    started = time.process_time()
    asked = build_request(ReduceOptions.from_options(dict(options)))
    reduction, planned = reduce_as_asked(own.dense, moments, asked, images=own.inputs)
    cpu_s = time.process_time() - started
    error, median = relative_errors(outputs(reduction.model, own.held_out), own.answers)
    more = {}
    if own.more_held_out is not None:
        pair = (outputs(model, own.more_held_out) for model in (reduction.model, dense))
        more = dict(zip(("more_error", "more_median_error"), relative_errors(*pair), strict=True))
    fitted, _ = relative_errors(outputs(reduction.model, own.inputs), outputs(dense, own.inputs))
    return {
        "error": error,
        "median_error": median,
        **more,
        "fitted_error": fitted,
        "macs_share": macs(reduction.model) / macs(dense),
        "cpu_s": cpu_s,
        "passes": cpu_s / pass_s,
        "stages": [asdict(stage) for stage in planned.stages],
    }


@measures("benchmarks/efforts")
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To fit to.")
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="To judge by.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(bench: Bench, crops: int, held_out: int, threads: int) -> None:
    """Reduce each model by each effort."""
    torch.set_num_threads(threads)
    bench.share(threads=threads, crops=crops, held_out=held_out)
    for name, asked in ASKED.items():
        sizes = (min(crops, TEXTS), HELD_OUT_TEXTS) if name == "MiniLM" else (crops, held_out)
        with tempfile.TemporaryDirectory() as scratch:
            subject = cache(partial(SUBJECTS[name], Path(scratch), *sizes))
            for what, options in asked.items():
                for effort in EFFORTS:
                    key = {"model": name, "asked": what, "effort": effort}
                    bench.row(key, row_of, subject, {**options, "effort": effort})


if __name__ == "__main__":
    main()
