"""INT8 and FP8 on dense and reduced models: errors, engines, and speed on a CPU.

    python -m benchmarks.quality.quantised --output benchmarks/results/quantised.json

`quality` has the digits example, dense and reduced, against its FP32 graphs on held-out images; `plain` ends each range
at the largest value and balances nothing. `plans` has DeiT-S with random weights in TensorRT-RTX. `cpu` has DeiT-S in
ONNX Runtime, each graph interleaved with the dense FP32 graph.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import digits
from benchmarks.speed.random_models import build_rtx, halved, random_checkpoint
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof.candidates import candidate_from_path, run_in_batches
from corp_deploy.proof.speed import time_models
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised, quantiser_of
from corp_deploy.views.speed import speed_record
from examples.digits.images import load_part
from perf.timing.laps import Plan

Images = NDArray[np.float32]
WAYS = {
    "plain": Quantisation(rest="fp32", scales="max", balance=False),
    "balanced": Quantisation(rest="fp32", scales="max"),
    "mse": Quantisation(rest="fp32", scales="mse"),
    "entropy": Quantisation(rest="fp32", scales="entropy"),
    "auto": Quantisation(rest="fp32"),
}
SM = "89"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A model and the outputs of its FP32 graph on held-out images."""

    checkpoint: Checkpoint
    expected: Images

    def row(self, path: Path) -> dict[str, float]:
        """Judge a graph by the outputs of the FP32 one and by labels."""
        held_out = load_part("held-out")
        rows = answers(path, self.checkpoint, held_out.images)
        error = float(np.linalg.norm(rows - self.expected) / np.linalg.norm(self.expected))
        return {"error": error, "accuracy": float((rows.argmax(axis=1) == held_out.labels).mean())}


def answers(path: Path, checkpoint: Checkpoint, images: Images) -> Images:
    """Return a graph's outputs for all images, computed in its types."""
    ports = output_ports(checkpoint.model)
    with candidate_from_path(path).opened(ports) as run:
        return run_in_batches(run, {input_ports(checkpoint.model)[0].name: images}, 16)[ports[0].name]


def quality(bench: Bench, name: str, checkpoint: Checkpoint, path: Path) -> None:
    """Make a row for each way and format; every graph is written to `path`."""
    export_checkpoint(checkpoint, path, precision="fp32")
    judged = Judged(checkpoint=checkpoint, expected=answers(path, checkpoint, load_part("held-out").images))
    feeds = {"images": load_part("train").images[:256]}
    quantiser = cache(lambda balance: quantiser_of(checkpoint, feeds, Quantisation(rest="fp32", balance=balance)))

    def plain(precision: str) -> dict[str, float]:
        export_checkpoint(checkpoint, path, precision=precision)
        return judged.row(path)

    def quantised(precision: str, chosen: Quantisation) -> dict[str, float]:
        export_quantised(quantiser(chosen.balance), path, precision=precision, chosen=chosen)
        return judged.row(path)

    for precision in ("fp32", "fp16"):
        bench.row({"model": name, "precision": precision, "way": ""}, plain, precision, part="quality")
    for precision in ("int8", "fp8"):
        for way, chosen in WAYS.items():
            key = {"model": name, "precision": precision, "way": way}
            bench.row(key, quantised, precision, chosen, part="quality")


def deit(name: str) -> Checkpoint:
    """Return DeiT-S, dense or with half the hidden channels and square heads of half the width."""
    dense = random_checkpoint("deit_small_patch16_224")
    return dense if name == "dense" else halved(dense, "square")


def noise() -> dict[str, Images]:
    """Return sixteen images of noise; with random weights any range is as good."""
    return {"images": np.random.default_rng(0).standard_normal((16, 3, 224, 224)).astype(np.float32)}


def graph_of(name: str, precision: str, rest: str, path: Path) -> Path:
    """Write one of DeiT-S's graphs."""
    checkpoint, chosen = deit(name), Quantisation(rest=rest, scales="max")
    if precision in ("int8", "fp8"):
        quantiser = quantiser_of(checkpoint, noise(), chosen)
        export_quantised(quantiser, path, precision=precision, chosen=chosen)
    else:
        export_checkpoint(checkpoint, path, precision=precision)
    return path


def plan_of(name: str, precision: str, folder: Path) -> dict[str, Any]:
    """Build one plan and return its figures."""
    record = build_rtx(graph_of(name, precision, "fp16", folder / "graph.onnx"), SM)
    return {
        "recorded": record.precision,
        "plan_bytes": record.plan_bytes,
        "kernels": record.kernels,
        "kernel_kinds": dict(record.kernel_kinds),
        "fused_attention": record.fused_attention,
        "attention_sites": len(record.attention_sites),
    }


def timed(name: str, precision: str, graph: Callable[[str, str], Path]) -> dict[str, Any]:
    """Time one graph against the dense FP32 graph on the CPU."""
    plan = Plan(time_limit_s=30.0, min_rounds=8, noise_rounds=8)
    graphs = graph("dense", "fp32"), graph(name, precision)
    return speed_record(time_models(*graphs, batches=(1, 8), plan=plan, running=RunOptions(threads=2)))


@measures("benchmarks/quantised")
def main(bench: Bench) -> None:
    """Measure all parts."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subject = digits(folder, 512, 500)
        widths = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
        method = method_from_preset("best", **widths, geometry="square")
        reduced = replace(subject.dense, model=reduce(subject.dense.model, subject.moments, method).model)
        for name, checkpoint in (("dense", subject.dense), ("reduced", reduced)):
            quality(bench, f"digits, {name}", checkpoint, folder / "digits.onnx")
        for name in ("dense", "reduced"):
            for precision in ("fp16", "int8", "fp8"):
                bench.row({"model": name, "precision": precision}, plan_of, name, precision, folder, part="plans")
        graph = cache(lambda name, bits: graph_of(name, bits, "fp32", folder / f"{name}.{bits}.onnx"))
        for name, precision in (("dense", "int8"), ("reduced", "fp32"), ("reduced", "int8")):
            bench.row({"model": name, "precision": precision}, timed, name, precision, graph, part="cpu")


if __name__ == "__main__":
    main()
