"""Outputs and latency of graphs in OpenVINO against ONNX Runtime on the CPU.

    python -m benchmarks.speed.openvino --output benchmarks/results/openvino.json

`agreement` has a row for each instance of benchmarks/coverage whose library is installed: relative errors of the FP32
graph, with random weights and inputs, between OpenVINO in float32, ONNX Runtime and torch, the worst of all outputs and
of two batch sizes. `latency` has DeiT-S with random weights, dense against 50 % joint sparsity, interleaved in one
process, for each runtime, and for OpenVINO in BF16.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks.coverage.instances import INSTANCES, Instance
from benchmarks.coverage.models import dense, inputs
from benchmarks.harness import Bench, measures
from benchmarks.speed.random_models import halved, random_checkpoint, time_pair
from calib.inputs import chunks, tensors_by_name
from corp_deploy.families.counting import macs
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.invocation.running import Backend, RunOptions
from corp_deploy.store.checkpoint import Checkpoint
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

BATCHES = (1, 8)
BOUND = 1e-5
THREADS = 2
WAYS: tuple[tuple[Backend, Any], ...] = (("openvino", "fp32"), ("onnxruntime", None), ("openvino", "bf16"))


def feeds_of(instance: Instance, checkpoint: Checkpoint, directory: Path) -> Iterator[Feeds]:
    """Yield random inputs in two batch sizes, by the names of the model's ports."""
    ports = input_ports(checkpoint.model)
    (batch,) = islice(inputs(instance, checkpoint.model, max(BATCHES), 2, directory).batches(max(BATCHES)), 1)
    for count in BATCHES:
        tensors = tensors_by_name(next(chunks(batch, count))).values()
        yield {port.name: tensor.numpy() for port, tensor in zip(ports, tensors, strict=True)}


def answers(runner: Runner, feeds: Feeds) -> Outputs:
    return runner(feeds_of_ports(feeds, runner.inputs))


def error(got: Outputs, exact: Outputs) -> float:
    """Return the relative error of the worst output."""
    pairs = [(got[name].astype(np.float64), rows.astype(np.float64)) for name, rows in exact.items()]
    return max(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs)


def agreement(instance: Instance) -> dict[str, Any]:
    """Return the errors of one instance, or the reason why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            checkpoint = dense(instance, scratch, seed=0)
        except BadInput as refusal:
            return {"refused": str(refusal)}
        return errors_of(instance, checkpoint, scratch)


def errors_of(instance: Instance, checkpoint: Checkpoint, scratch: Path) -> dict[str, Any]:
    """Return the errors between both runtimes and torch."""
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
    return {"class": type(model).__name__, "computed_in": computed, **worst}


def latency(backend: Backend, dtype: Any, plan: Plan) -> dict[str, Any]:
    """Time DeiT-S in one runtime, dense against half the hidden channels and square heads of half the width."""
    checkpoint = random_checkpoint("deit_small_patch16_224")
    reduced, load = halved(checkpoint, "square"), os.getloadavg()[0]
    running = RunOptions(backend=backend, dtype=dtype, threads=THREADS)
    bench = time_pair(checkpoint, reduced, BATCHES, plan, running)
    return {
        "model": "DeiT-S",
        "heads": "square",
        "macs_share": macs(reduced.model) / macs(checkpoint.model),
        "load_before": load,
        "cpu": cpu_name(),
        **speed_record(bench),
        "describe": [asdict(subject)["describe"] for subject in bench.subjects],
    }


@measures("benchmarks/openvino")
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Least rounds per batch size.")
def main(bench: Bench, time_limit: float, rounds: int) -> None:
    """Compare outputs and latency."""
    torch.set_num_threads(1)
    bench.share(bound=BOUND, batches=list(BATCHES))
    for instance in INSTANCES:
        bench.row(instance.key, agreement, instance, part="agreement")
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    for backend, dtype in WAYS:
        key = {"runtime": backend, "arithmetic": dtype or "fp32"}
        bench.row(key, latency, backend, dtype, plan, part="latency")


if __name__ == "__main__":
    main()
