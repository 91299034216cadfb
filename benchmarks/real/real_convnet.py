"""A convolutional network of real weights on real photographs: EfficientNet-Lite0 at shares of its MACs.

    make real
    python -m benchmarks.real.real_convnet --output benchmarks/results/real_convnet.json

Fitted to crops of 37 photographs, judged on crops of 16 others: relative error of the logits and agreement of the top
class with the dense model. A row is one `reduce` command in a process of its own. Uniform rows remove the same share of
the channels everywhere, the least whole percent that meets the share; rows of a budget choose by site.
"""

import fnmatch
import json
import shutil
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Record
from benchmarks.real import lite0, photographs
from benchmarks.real.commands import run
from benchmarks.real.place import ROOT, assembled
from corp_deploy.families.counting import macs, parameters
from corp_deploy.machine import versions
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.narrowing import at_widths
from ground.errors import Missing
from ground.files import write_json
from perf.parity.measures import measures
from perf.timing.watch import cpu_name

KIND = "benchmarks/real-convnet"
SHARES = (0.8, 0.66, 0.5)
ALIGN = 8
BATCH = 16
KEY = ("method", "share")
MODEL = ["--model", lite0.ARCHITECTURE.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method by what is said to `reduce`; `budget` rows settle the widths themselves."""

    name: str
    said: str
    budget: bool = False


ROWS = (
    Row(name="none", said="--preset none"),
    Row(name="corp", said="--preset corp"),
    Row(name="grail", said="--preset grail"),
    Row(name="grail, REPAIR", said="--preset grail --rescale"),
    Row(name="grail, symmetric loop", said="--preset grail --closed-loop symmetric"),
    Row(name="best", said="--preset best"),
    Row(name="best, closed loop", said="--preset best --closed-loop"),
    Row(name="best, by site", said="--preset best", budget=True),
    Row(name="best, by site, closed loop", said="--preset best --closed-loop", budget=True),
)


def renormalised(path: Path, count: int) -> Tensor:
    """Crops as this model takes them."""
    crops = np.load(path, mmap_mode="r")[:count]
    pictures = crops * photographs.STD[:, None, None] + photographs.MEAN[:, None, None]
    return torch.from_numpy((pictures - lite0.MEAN) / lite0.STD).float()


def share_left(model: nn.Module, sparsity: float) -> float:
    """Of the MACs, where the same share of channels is removed everywhere."""
    widths = uniform_widths(model, method_from_preset("best", conv_sparsity=sparsity, align_conv=ALIGN))
    return macs(at_widths(model, widths)) / macs(model)


def looks_at_images(row: Row) -> bool:
    """Whether the command does."""
    return row.budget or "loop" in row.said or "rescale" in row.said


def uniform_sparsity(model: nn.Module, share: float) -> float:
    """The least whole percent removed everywhere that leaves so much of the MACs."""
    return bisect_left(range(100), -share, key=lambda percent: -share_left(model, percent / 100)) / 100


class Bench:
    """The dense model, crops to fit and to judge, and moments that all rows share."""

    def __init__(self, ready: Path, work: Path, crops: int, threads: int) -> None:
        self.ready, self.work, self.threads = ready, work, threads
        self.weights = lite0.weights(ready.parent)
        work.mkdir(parents=True, exist_ok=True)
        self.images, groups = work / "lite0-calib.npy", json.loads((ready / "calib_groups.json").read_text())
        np.save(self.images, renormalised(ready / "calib.npy", crops).numpy())
        self.groups = work / "lite0-groups.json"
        self.groups.write_text(json.dumps(groups[:crops]))
        self.held_out = renormalised(ready / "held.npy", 128)
        self.model = load_dense(MODEL[1], weights=self.weights, kwargs={}).model

    @cached_property
    def dense(self) -> np.ndarray[Any, Any]:
        return self._logits(self.model)

    def _logits(self, model: nn.Module) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            return torch.cat([model(batch) for batch in self.held_out.split(BATCH)]).numpy()

    def moments(self) -> Path:
        path, cost = self.work / "lite0-moments.safetensors", self.work / "lite0-moments.json"
        if not cost.is_file():
            said = ["--images", str(self.images), "--groups", str(self.groups), "--batch-size", str(BATCH)]
            took = run(["calibrate", *MODEL, "--weights", str(self.weights), *said, "-o", str(path)], self.threads)
            write_json(cost, asdict(took))
        return path

    def row(self, row: Row, share: float) -> Mapping[str, Any]:
        widths = f"--macs {share}" if row.budget else f"--conv {uniform_sparsity(self.model, share):g}"
        said = f"{row.said} {widths} --align conv={ALIGN}"
        directory = self.work / "lite0-reduced"
        shutil.rmtree(directory, ignore_errors=True)
        images = ["--images", str(self.images)] if looks_at_images(row) else []
        given = ["--weights", str(self.weights), "--moments", str(self.moments()), *images, "-o", str(directory)]
        cost = run(["reduce", *MODEL, *given, *said.split()], self.threads)
        model = load_checkpoint(directory).model
        found = measures(self.dense, self._logits(model), role="logits")
        return {
            "method": row.name,
            "share": share,
            "command": f"reduce {said}",
            "macs_share": macs(model) / macs(self.model),
            "parameters": parameters(model),
            "error": found.relative_error,
            "agreement": found.agreement,
            **asdict(cost),
        }


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--rows", "pattern", default="*", show_default=True, help="Rows whose name fits this pattern.")
@click.option("--shares", default=",".join(map(str, SHARES)), show_default=True)
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To calibrate on.")
@click.option("--again", is_flag=True, help="Make rows that are there anew.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ready", type=click.Path(path_type=Path, file_okay=False), default=assembled())
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "work-lite0")
def main(
    output: Path, pattern: str, shares: str, crops: int, again: bool, threads: int, ready: Path, work: Path
) -> None:
    try:
        bench = Bench(ready, work, crops, threads)
    except Missing as reason:
        click.echo(f"skipped: {reason}")
        return
    setting = {
        "model": "EfficientNet-Lite0, 224 pixels", "cpu": cpu_name(), "threads": threads, "versions": versions(),
        "crops": crops, "held_out": len(bench.held_out), "dense_macs": macs(bench.model),
    }  # fmt: skip
    record = Record(output, KIND, setting)
    for share in map(float, shares.split(",")):
        for each in ROWS:
            key = {"method": each.name, "share": share}
            if not fnmatch.fnmatchcase(each.name, pattern) or (not again and record.has("rows", key)):
                continue
            row = dict(bench.row(each, share))
            record.put("rows", row, KEY)
            found = f"error {row['error']:.3f}, agreement {row['agreement']:.1%}"
            click.echo(f"{each.name} at {share:g} ({row['macs_share']:.3f}): {found}, {row['cpu_s']:.0f} CPU s")
    record.order("rows", "method", [each.name for each in ROWS])


if __name__ == "__main__":
    main()
