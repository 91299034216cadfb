"""Graphs in OpenVINO beside ONNX Runtime, on the CPU: the same outputs, and how long they take.

    python -m benchmarks.speed.openvino --output benchmarks/results/openvino.json

`agreement`: of every instance of the coverage table (benchmarks/coverage) whose library is installed, its FP32 graph
with random weights on random inputs in both, computed in float32: the relative error of each output, the worst of two
batch sizes, and of ONNX Runtime beside torch. `latency`: DeiT-S, weights random, dense against 50 % joint sparsity,
interleaved in one process, by runtime; and each model in OpenVINO against itself computed in BF16.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.coverage.instances import INSTANCES, Instance
from benchmarks.coverage.models import dense, inputs
from benchmarks.harness import Record
from benchmarks.speed.cpu_latency import halved
from calib.inputs import chunks, tensors_by_name
from corp_deploy.families.counting import macs
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import Backend, RunOptions
from corp_deploy.machine import versions
from corp_deploy.proof.speed import time_models
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.views.speed import speed_record
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, feeds_of_ports
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.runners.openvino import OpenVinoRunner
from perf.runners.protocol import Runner
from perf.timing.laps import Plan
from perf.timing.watch import cpu_name

KIND, PARTS = "benchmarks/openvino", ("agreement", "latency")
BATCHES = (1, 8)
BOUND = 1e-5
THREADS = 2


def feeds_of(instance: Instance, checkpoint: Checkpoint, directory: Path) -> Iterator[Feeds]:
    """Random inputs in two batch sizes, by the names of the model's ports."""
    ports = input_ports(checkpoint.model)
    (batch,) = islice(inputs(instance, checkpoint.model, max(BATCHES), 2, directory).batches(max(BATCHES)), 1)
    for count in BATCHES:
        tensors = tensors_by_name(next(chunks(batch, count))).values()
        yield {port.name: tensor.numpy() for port, tensor in zip(ports, tensors, strict=True)}


def answers(runner: Runner, feeds: Feeds) -> Outputs:
    return runner(feeds_of_ports(feeds, runner.inputs))


def error(got: Outputs, exact: Outputs) -> float:
    """Relative, of the worst output."""
    pairs = [(got[name].astype(np.float64), rows.astype(np.float64)) for name, rows in exact.items()]
    return max(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs)


def agreement(instance: Instance, scratch: Path) -> dict[str, Any]:
    """One row; of a model that no family takes the reason."""
    row: dict[str, Any] = {"source": instance.source, "family": instance.family, "name": instance.name}
    try:
        checkpoint = dense(instance, scratch, seed=0)
    except BadInput as refusal:
        return row | {"refused": str(refusal)}
    graph, model = scratch / "model.onnx", checkpoint.model
    export_checkpoint(checkpoint, graph, precision="fp32")
    worst = {"openvino_of_onnxruntime": 0.0, "onnxruntime_of_torch": 0.0, "openvino_of_torch": 0.0}
    with (
        OpenVinoRunner(graph, arithmetic="fp32", threads=1) as openvino,
        OnnxRunner(graph, threads=1) as onnxruntime,
        ModuleRunner(model, inputs=input_ports(model), outputs=output_ports(model)) as module,
    ):
        for feeds in feeds_of(instance, checkpoint, scratch):
            ours, theirs, exact = (answers(each, feeds) for each in (openvino, onnxruntime, module))
            errors = (error(ours, theirs), error(theirs, exact), error(ours, exact))
            worst = {name: max(now, each) for (name, now), each in zip(worst.items(), errors, strict=True)}
        computed = openvino.describe()["computed_in"]
    return row | {"class": type(model).__name__, "computed_in": computed, **worst}


def add_agreement(record: Record, pattern: str) -> None:
    for instance in INSTANCES:
        key = {"source": instance.source, "name": instance.name}
        if pattern not in instance.name or record.has("agreement", key):
            continue
        if instance.source != "timm" and find_spec(instance.source) is None:
            click.echo(f"{instance.name}: skipped, {instance.source} is not installed")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            row = agreement(instance, Path(scratch))
        record.put("agreement", row, ("source", "name"))
        click.echo(f"{instance.name}: {row.get('openvino_of_onnxruntime', row.get('refused'))}")


def deit() -> tuple[Checkpoint, Checkpoint]:
    """DeiT-S, dense and with half the hidden channels and square heads of half the width."""
    architecture = Architecture(name="deit_small_patch16_224")
    checkpoint = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    return checkpoint, halved(checkpoint, "square")


def add_latency(record: Record, plan: Plan) -> None:
    """Dense against reduced by runtime, then ONNX Runtime against nothing else: two runtimes in one process share
    threads, so each has a bench of its own.
    """
    pair = deit()
    share = macs(pair[1].model) / macs(pair[0].model)
    ways: tuple[tuple[Backend, Any], ...] = (("openvino", "fp32"), ("onnxruntime", None), ("openvino", "bf16"))
    with tempfile.TemporaryDirectory() as scratch:
        graphs = Path(scratch) / "dense.onnx", Path(scratch) / "reduced.onnx"
        for checkpoint, path in zip(pair, graphs, strict=True):
            export_checkpoint(checkpoint, path, precision="fp32")
        for backend, dtype in ways:
            load = os.getloadavg()[0]
            running = RunOptions(backend=backend, dtype=dtype, threads=THREADS)
            bench = time_models(*graphs, batches=BATCHES, plan=plan, running=running)
            row = {
                "runtime": backend,
                "arithmetic": dtype or "fp32",
                "model": "DeiT-S",
                "heads": "square",
                "macs_share": share,
                "load_before": load,
                "cpu": cpu_name(),
                **speed_record(bench),
                "describe": [asdict(subject)["describe"] for subject in bench.subjects],
            }
            record.put("latency", row, ("runtime", "arithmetic"))
            click.echo(f"{backend} {dtype or ''}: done")


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--rows", "pattern", default="", help="Of the agreement, names with this in them.")
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Least rounds per batch size.")
def main(output: Path, parts: str, pattern: str, time_limit: float, rounds: int) -> None:
    """Measure and write the record, after every row; rows of the agreement that it has are kept."""
    torch.set_num_threads(1)
    record = Record(output, KIND, {"versions": versions(), "bound": BOUND, "batches": list(BATCHES)})
    if "agreement" in parts.split(","):
        add_agreement(record, pattern)
    if "latency" in parts.split(","):
        add_latency(record, Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds))


if __name__ == "__main__":
    main()
