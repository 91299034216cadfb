"""What `verify` costs beside the forward passes it can't do without, and the memory it takes.

    python -m benchmarks.speed.proof_cost --output benchmarks/results/proof_cost.json

A dense model with random weights, its half, and the half's FP32 and FP16 graphs are verified on random images by the
command itself, in a process of its own. The passes it can't do without: every artefact over all images once, at the
largest batch, and the dense model in FP16, whose error is the measure of FP16. CPU seconds are of all threads.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.machine import versions
from corp_deploy.proof.candidates import Run, candidate_from_path, run_in_batches
from corp_deploy.proof.own_noise import HalfProducts
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from export.graph.precision import typed_copy
from ground.feeds import Feeds, Outputs, select_rows, single_array
from ground.files import write_json
from perf.timing.watch import cpu_name

BATCHES = (1, 7, 32)
FEW = 4  # images that the reduced model is calibrated on: any weights do here
ARTEFACTS = ("dense", "reduced", "reduced.onnx", "reduced.fp16.onnx")


def made(architecture: Architecture, images: int, folder: Path) -> Path:
    """Both models, the graphs and the images; returns the images' path."""
    torch.manual_seed(0)
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    path = folder / "images.npy"
    shape = input_ports(dense.model)[0].shape
    np.save(path, np.random.default_rng(0).standard_normal((images, *shape), dtype=np.float32))
    moments = calibrate(dense, images_for_model(dense.model, path, samples=FEW), batch_size=FEW)
    halved = method_from_preset("none", mlp_sparsity=0.5, attention_sparsity=0.5)
    reduced = Checkpoint(
        model=reduce(dense.model, moments, halved).model, architecture=architecture, lineage=dense.lineage
    )
    save(dense, folder / "dense")
    save(reduced, folder / "reduced")
    export_checkpoint(reduced, folder / "reduced.onnx", precision="fp32")
    export_checkpoint(reduced, folder / "reduced.fp16.onnx", precision="fp16")
    return path


def in_half(model: nn.Module) -> Run:
    """The dense model in FP16, as a proof runs it."""
    half = typed_copy(traced_model.exportable(model), "fp16")

    def run(feeds: Feeds) -> Outputs:
        with torch.no_grad(), HalfProducts():  # type: ignore[no-untyped-call]
            logits = half(torch.from_numpy(single_array(feeds))).numpy()
        return {"logits": logits}

    return run


def one_pass(run: Run, feeds: Feeds) -> float:
    """CPU seconds of all images once, after a first one."""
    run(select_rows(feeds, slice(1)))
    start = time.process_time()
    run_in_batches(run, feeds, max(BATCHES))
    return time.process_time() - start


def needed(folder: Path, images: Path) -> dict[str, float]:
    """CPU seconds of one pass over the images by artefact, once it is open and warm."""
    feeds = {"images": np.load(images)}
    dense = candidate_from_path(folder / ARTEFACTS[0]).checkpoint
    assert dense is not None, folder
    seconds = {"dense in FP16": one_pass(in_half(dense.model), feeds)}
    for name in ARTEFACTS:
        with candidate_from_path(folder / name).opened(output_ports(dense.model)) as run:
            seconds[name] = one_pass(run, feeds)
    return seconds


def peak_kb(pid: int) -> int:
    """The most memory the process has held since it was started; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def verified(folder: Path, images: Path, threads: int) -> dict[str, float]:
    """CPU seconds, wall seconds and peak memory of the command, interpreter and imports included.

    The peak is read while it runs: what `wait` tells counts the parent's memory in.
    """
    words = ["verify", *(str(folder / name) for name in ARTEFACTS), "--images", str(images), "--max-error", "10"]
    words += ["--batch", ",".join(map(str, BATCHES)), "-o", str(folder / "parity.json"), "--quiet"]
    start, peak = time.perf_counter(), 0
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen([sys.executable, "-m", "corp_deploy", *words], env=environment)
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak = max(peak, peak_kb(process.pid))
        time.sleep(0.02)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1), process.returncode
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.perf_counter() - start,
        "peak_mb": peak / 1e3,
    }


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--model", default="deit_base_patch16_224", show_default=True)
@click.option("--model-kwargs", type=json.loads, default="{}", show_default=True, help="JSON for timm.create_model.")
@click.option("--images", type=click.IntRange(8), default=32, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def main(output: Path, model: str, model_kwargs: dict[str, Any], images: int, threads: int) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = made(Architecture(name=model, kwargs=model_kwargs), images, Path(scratch))
        passes, whole = needed(Path(scratch), path), verified(Path(scratch), path, threads)
    record = {
        "kind": "benchmarks/proof-cost",
        "version": 1,
        "cpu": cpu_name(),
        "threads": threads,
        "versions": versions(),
        "model": model,
        "model_kwargs": model_kwargs,
        "images": images,
        "batches": list(BATCHES),
        "pass_cpu_s": passes,
        "verify": whole,
        "ratio": whole["cpu_s"] / sum(passes.values()),
    }
    write_json(output, record)
    click.echo(
        f"verify: {whole['cpu_s']:.1f} CPU s, {record['ratio']:.2f} of the passes needed, {whole['peak_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
