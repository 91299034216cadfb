"""Tokens merged for MLPs alone: errors against narrower widths, and time against the dense model.

    make real
    python -m benchmarks.quality.mlp_merging --output benchmarks/results/mlp_merging.json

DINOv2-S on photographs has errors of the class token, a Swin trained on the digits has errors of the logits. The Swin
is trained first if the cache lacks its weights (about ten minutes on one idle CPU core). Shares of the tokens are
merged at full widths and together with a budget of MACs; `widths` have the same multiply-adds with all tokens, at quick
effort. Times are of ONNX graphs with random weights in ONNX Runtime on two CPU threads, interleaved.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.positions import trained
from benchmarks.quality.subjects import Subject, digits, dinov2, outputs, relative_errors
from benchmarks.speed.random_models import random_checkpoint, time_pair
from corp_deploy.families.counting import macs
from corp_deploy.families.traced_model import token_mlps, with_merging
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.views.speed import speed_record
from perf.timing.laps import Plan

SWIN = Architecture(
    name="swin_tiny_patch4_window7_224",
    kwargs={
        "img_size": 32,
        "patch_size": 2,
        "window_size": 8,
        "embed_dim": 48,
        "depths": [2, 4],
        "num_heads": [2, 4],
        "num_classes": 10,
    },
)
SHARES, BUDGET, BESIDE = (0.1, 0.2, 0.3, 0.4, 0.5), 0.8, "15%"
TIMED: Mapping[str, tuple[int, ...]] = {"deit_small_patch16_224": (1, 8), "swin_tiny_patch4_window7_224": (1, 8)}
PLAN = Plan(time_limit_s=40.0, min_rounds=8)


def merged_at(model: nn.Module, share: float) -> nn.Module:
    """Return the model with this share of every MLP's tokens merged."""
    return with_merging(model, Merging(schedule=tuple(mlp.count(share) for mlp in token_mlps(model)), how="mlp"))


def judged(own: Subject, model: nn.Module) -> dict[str, Any]:
    error, median = relative_errors(outputs(model, own.held_out), own.answers)
    return {"error": error, "median_error": median, "macs_share": macs(model) / macs(own.dense.model)}


def merged_row(subject: Callable[[], Subject], share: float) -> dict[str, Any]:
    return judged(subject(), merged_at(subject().dense.model, share))


def reduced_row(subject: Callable[[], Subject], options: Mapping[str, Any]) -> dict[str, Any]:
    own = subject()
    asked = build_request(ReduceOptions.from_options(dict(options)))
    return judged(own, reduce_as_asked(own.dense, own.moments, asked, images=own.inputs)[0].model)


def widths_row(subject: Callable[[], Subject], share: float) -> dict[str, Any]:
    """Reduce widths to the multiply-adds of the model that merges this share."""
    dense = subject().dense.model
    return reduced_row(subject, {"macs": round(macs(merged_at(dense, share)) / macs(dense), 3)})


def time_row(name: str, share: float, batches: tuple[int, ...]) -> dict[str, Any]:
    """Time a model with this share of every MLP's tokens merged against the dense model."""
    dense = random_checkpoint(name)
    merged = replace(dense, model=merged_at(dense.model, share))
    bench = speed_record(time_pair(dense, merged, batches, PLAN))
    rows = [{each: row[each] for each in ("batch", "speedup", "noise")} for row in bench["rows"]]
    return {"macs_share": macs(merged.model) / macs(dense.model), "rows": rows}


@measures("benchmarks/mlp-merging")
@click.option("--cache", "models", type=click.Path(path_type=Path), default=Path("build/models"), show_default=True)
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="Crops to judge by.")
def main(bench: Bench, models: Path, held_out: int) -> None:
    """Merge tokens for MLPs of two models, beside widths of the same cost, then time graphs."""
    torch.set_num_threads(1)
    bench.share(held_out=held_out)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        subjects: Mapping[str, Callable[[], Subject]] = {
            "Swin": cache(lambda: digits(scratch, 512, 500, trained(SWIN, models))),
            "DINOv2-S": cache(partial(dinov2, scratch, 512, held_out)),
        }
        for name, subject in subjects.items():
            for share in SHARES:
                bench.row({"model": name, "way": "merged", "share": share}, merged_row, subject, share)
            for share in SHARES if name == "Swin" else ():
                bench.row({"model": name, "way": "widths", "share": share}, widths_row, subject, share)
            mixed = {"macs": BUDGET, "merge_tokens": BESIDE, "merge_how": "mlp"}
            bench.row({"model": name, "way": f"merged {BESIDE} and widths", "share": 0.0}, reduced_row, subject, mixed)
            bench.row({"model": name, "way": "widths", "share": 0.0}, reduced_row, subject, {"macs": BUDGET})
        for name, batches in TIMED.items():
            bench.row({"timed": name, "share": 0.3}, time_row, name, 0.3, batches, part="times")


if __name__ == "__main__":
    main()
