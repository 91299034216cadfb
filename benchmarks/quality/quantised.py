"""INT8 and FP8 on top of reduced widths: what they change, what engines make of them, how fast a CPU runs them.

    make real
    python -m benchmarks.quality.quantised --output benchmarks/results/quantised.json

`quality`: the digits example and a DINOv2-S on photographs (see benchmarks/real/real_vit.py), dense and reduced,
against their own FP32 graphs on held-out images; `plain` takes the largest value seen as the end of each range and
balances nothing. `plans`: DeiT-S on TensorRT-RTX, weights random. `cpu`: DeiT-S in ONNX Runtime, each graph interleaved
with the dense FP32 one. `--parts` makes some of them anew and leaves the others as they are in the record.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.real.commands import run as command
from benchmarks.real.place import assembled
from benchmarks.real.subject import Calibration, Subject
from benchmarks.real.weights import ARCHITECTURE
from benchmarks.speed.cpu_latency import halved
from corp_deploy.invocation.running import RunOptions
from corp_deploy.machine import versions
from corp_deploy.proof.candidates import candidate_from_path, outputs_at
from corp_deploy.proof.speed import measure
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised, quantiser_of
from corp_deploy.views.speed import speed_record
from examples.digits.images import load
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.files import write_json
from perf.timing.laps import Plan
from perf.timing.watch import cpu_name

PARTS = ("quality", "plans", "cpu")
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"
WAYS = {
    "plain": Quantisation(rest="fp32", scales="max", balance=False),
    "balanced": Quantisation(rest="fp32", scales="max"),
    "mse": Quantisation(rest="fp32", scales="mse"),
    "entropy": Quantisation(rest="fp32", scales="entropy"),
    "auto": Quantisation(rest="fp32"),
}
CROPS, IMAGES = 256, 48
SM = "89"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A model with inputs for its ranges and held-out ones, labels where there are any."""

    name: str
    checkpoint: Checkpoint
    fitting: NDArray[np.float32]
    held_out: NDArray[np.float32]
    labels: NDArray[np.int64] | None = None


def digits(work: Path) -> Iterator[Judged]:
    """The example, dense and at half its widths by `best`."""
    train, held_out = load("train"), load("held-out")
    images = work / "digits.npy"
    np.save(images, train.images[:512])
    moments, reduced = work / "digits.safetensors", work / "digits"
    command(["calibrate", "--model", str(DIGITS), "--images", str(images), "--output", str(moments)], 2)
    words = ["--mlp", "0.5", "--attn", "0.5", "--heads", "square", "--align", "mlp=8,head=8"]
    command(["reduce", "--model", str(DIGITS), "--moments", str(moments), *words, "--output", str(reduced)], 2)
    for name, directory in (("dense", DIGITS), ("reduced", reduced)):
        yield Judged(
            name=f"digits, {name}",
            checkpoint=load_checkpoint(directory),
            fitting=train.images[:256],
            held_out=held_out.images,
            labels=held_out.labels,
        )


def dinov2(work: Path) -> Iterator[Judged]:
    """Real weights, dense and at .8 of the MACs by `best`."""
    subject = Subject(assembled(), work, held_out=IMAGES, threads=2)
    calibration = Calibration(assembled(), work, crops=CROPS)
    moments, reduced = work / "dinov2.safetensors", work / "dinov2"
    if not (reduced / "config.json").is_file():
        given = ["--images", str(calibration.path), "--output", str(moments)]
        command(["calibrate", *subject.model_words, *given], 2)
        given = ["--moments", str(moments), "--images", str(calibration.path), "--macs", "0.8", "--heads", "square"]
        command(["reduce", *subject.model_words, *given, "--output", str(reduced)], 2)
    dense = Checkpoint(model=subject.model, architecture=ARCHITECTURE, lineage={})
    for name, checkpoint in (("dense", dense), ("reduced", load_checkpoint(reduced))):
        yield Judged(
            name=f"DINOv2-S, {name}",
            checkpoint=checkpoint,
            fitting=np.ascontiguousarray(calibration.images.numpy()[:: CROPS // IMAGES][:IMAGES]),
            held_out=subject.held_out.numpy(),
        )


def answers(path: Path, checkpoint: Checkpoint, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a graph gives to all images, as its types say."""
    from corp_deploy.families.family import input_ports, output_ports

    ports = output_ports(checkpoint.model)
    with candidate_from_path(path).opened(ports) as run:
        return outputs_at(run, {input_ports(checkpoint.model)[0].name: images}, 16)[ports[0].name]


def quality(subject: Judged) -> Iterator[dict[str, Any]]:
    """One row a way and a format."""
    with tempfile.TemporaryDirectory() as scratch:
        exact, path = Path(scratch) / "fp32.onnx", Path(scratch) / "graph.onnx"
        export_checkpoint(subject.checkpoint, exact, precision="fp32")
        expected = answers(exact, subject.checkpoint, subject.held_out)
        feeds = {"images": subject.fitting}
        made = {
            balance: quantiser_of(subject.checkpoint, feeds, Quantisation(rest="fp32", balance=balance))
            for balance in (False, True)
        }
        yield {"model": subject.name, "precision": "fp32", "way": "", "error": 0.0, **_accuracy(subject, expected)}
        export_checkpoint(subject.checkpoint, path, precision="fp16")
        rows = answers(path, subject.checkpoint, subject.held_out)
        yield {"model": subject.name, "precision": "fp16", "way": "", **_figures(subject, rows, expected)}
        for precision in ("int8", "fp8"):
            for way, chosen in WAYS.items():
                export_quantised(made[chosen.balance], path, precision=precision, chosen=chosen)
                rows = answers(path, subject.checkpoint, subject.held_out)
                yield {"model": subject.name, "precision": precision, "way": way} | _figures(subject, rows, expected)


def _accuracy(subject: Judged, rows: NDArray[np.float32]) -> dict[str, float]:
    if subject.labels is None:
        return {}
    return {"accuracy": float((rows.argmax(axis=1) == subject.labels).mean())}


def _figures(subject: Judged, rows: NDArray[np.float32], expected: NDArray[np.float32]) -> dict[str, float]:
    error = float(np.linalg.norm(rows - expected) / np.linalg.norm(expected))
    return {"error": error, **_accuracy(subject, rows)}


def deit(name: str) -> Checkpoint:
    """DeiT-S, dense or with half the hidden channels and square heads of half the width."""
    architecture = Architecture(name="deit_small_patch16_224")
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    return dense if name == "dense" else halved(dense, "square")


def noise() -> dict[str, NDArray[np.float32]]:
    """Sixteen images of noise, which any range will do for: weights are random, too."""
    return {"images": np.random.default_rng(0).standard_normal((16, 3, 224, 224)).astype(np.float32)}


def plans() -> Iterator[dict[str, Any]]:
    """One row a model and a precision."""
    for name in ("dense", "reduced"):
        checkpoint = deit(name)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "graph.onnx"
            chosen = Quantisation(scales="max")
            made = quantiser_of(checkpoint, noise(), chosen)
            for precision in ("fp16", "int8", "fp8"):
                if precision == "fp16":
                    export_checkpoint(checkpoint, path, precision=precision)
                else:
                    export_quantised(made, path, precision=precision, chosen=chosen)
                options = BuildOptions(backend="tensorrt-rtx", sms=(SM,), profiles=(BatchProfile.from_text("1:8:64"),))
                record = build_engine(path, options).record
                yield {
                    "model": name,
                    "precision": precision,
                    "recorded": record.precision,
                    "plan_bytes": record.plan_bytes,
                    "kernels": record.kernels,
                    "kernel_kinds": dict(record.kernel_kinds),
                    "fused_attention": record.fused_attention,
                    "attention_sites": len(record.attention_sites),
                }


def cpu() -> Iterator[dict[str, Any]]:
    """One row a graph, each against the dense FP32 one."""
    plan = Plan(time_limit_s=30.0, min_rounds=8, noise_rounds=8)
    with tempfile.TemporaryDirectory() as scratch:
        paths: dict[tuple[str, str], Path] = {}
        for name in ("dense", "reduced"):
            checkpoint, chosen = deit(name), Quantisation(rest="fp32", scales="max")
            for precision in ("fp32", "int8"):
                paths[name, precision] = path = Path(scratch) / f"{name}.{precision}.onnx"
                if precision == "fp32":
                    export_checkpoint(checkpoint, path, precision=precision)
                else:
                    export_quantised(
                        quantiser_of(checkpoint, noise(), chosen), path, precision=precision, chosen=chosen
                    )
        dense = paths["dense", "fp32"]
        for (name, precision), path in paths.items():
            if path != dense:
                bench = measure(dense, path, batches=(1, 8), plan=plan, running=RunOptions(threads=2))
                yield {"model": name, "precision": precision, **speed_record(bench)}


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=Path(".venv/real/quantised"))
def main(output: Path, parts: str, work: Path) -> None:
    """Measure and write the record, after every row."""
    torch.set_num_threads(2)
    work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}

    def add(part: str, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            record.setdefault(part, []).append(row)
            click.echo(json.dumps(row)[:300])
            record[f"{part}_made"] = {"cpu": cpu_name(), "load": os.getloadavg()[0], "versions": versions()}
            write_json(output, {**record, "kind": "benchmarks/quantised", "version": 1})

    for part in parts.split(","):
        record[part] = []
        if part == "quality":
            for subjects in (digits, dinov2):
                for subject in subjects(work):
                    add(part, quality(subject))
        else:
            add(part, {"plans": plans, "cpu": cpu}[part]())


if __name__ == "__main__":
    main()
