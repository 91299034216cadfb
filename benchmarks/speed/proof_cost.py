"""The cost of `verify` against the forward passes that it needs, and its memory.

    python -m benchmarks.speed.proof_cost --output benchmarks/results/proof_cost.json

The command verifies a dense model with random weights, the model with half of its widths, and the FP32 and FP16 graphs
of the latter on images of noise, in a separate process. The necessary passes are one of every artefact over all images,
at the largest batch, and one of the dense model in FP16, whose error is the measure of FP16. CPU seconds are of all
threads.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.speed.random_models import random_checkpoint, save_noise
from corp_deploy.families import traced_model
from corp_deploy.families.family import output_ports
from corp_deploy.proof.candidates import Run, candidate_from_path, run_in_batches
from corp_deploy.proof.own_noise import HalfProducts
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from export.graph.precision import typed_copy
from ground.feeds import Feeds, Outputs, select_rows, single_array

BATCHES = (1, 7, 32)
FEW = 4  # calibration images of the reduced model, whose weights don't matter here
ARTEFACTS = ("dense", "reduced", "reduced.onnx", "reduced.fp16.onnx")


def made(dense: Checkpoint, images: int, folder: Path) -> Path:
    """Write both models, the graphs and the images, and return the path of the images."""
    path = save_noise(dense.model, images, folder / "images.npy")
    moments = calibrate(dense, images_for_model(dense.model, path, samples=FEW), batch_size=FEW)
    halved = method_from_preset("none", mlp_sparsity=0.5, attention_sparsity=0.5)
    reduced = replace(dense, model=reduce(dense.model, moments, halved).model)
    save(dense, folder / "dense")
    save(reduced, folder / "reduced")
    export_checkpoint(reduced, folder / "reduced.onnx", precision="fp32")
    export_checkpoint(reduced, folder / "reduced.fp16.onnx", precision="fp16")
    return path


def in_half(model: nn.Module) -> Run:
    """Return a run of the dense model in FP16, as a proof makes it."""
    half = typed_copy(traced_model.exportable(model), "fp16")

    def run(feeds: Feeds) -> Outputs:
        with torch.no_grad(), HalfProducts():  # type: ignore[no-untyped-call]
            logits = half(torch.from_numpy(single_array(feeds))).numpy()
        return {"logits": logits}

    return run


def one_pass(run: Run, feeds: Feeds) -> float:
    """Return the CPU seconds of one pass over all images, after a first image."""
    run(select_rows(feeds, slice(1)))
    start = time.process_time()
    run_in_batches(run, feeds, max(BATCHES))
    return time.process_time() - start


def needed(folder: Path, images: Path) -> dict[str, float]:
    """Return the CPU seconds of one pass over the images by artefact, opened and warm."""
    feeds = {"images": np.load(images)}
    dense = candidate_from_path(folder / ARTEFACTS[0]).checkpoint
    assert dense is not None, folder
    seconds = {"dense in FP16": one_pass(in_half(dense.model), feeds)}
    for name in ARTEFACTS:
        with candidate_from_path(folder / name).opened(output_ports(dense.model)) as run:
            seconds[name] = one_pass(run, feeds)
    return seconds


def peak_kb(pid: int) -> int:
    """Return the peak memory of a process, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def verified(folder: Path, images: Path, threads: int) -> dict[str, float]:
    """Return CPU seconds, wall seconds and peak memory of the command, including interpreter and imports.

    The peak is read while the command runs, since the peak that `wait` reports includes the parent's memory.
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


@measures("benchmarks/proof-cost")
@click.option("--model", default="deit_base_patch16_224", show_default=True)
@click.option("--model-kwargs", type=json.loads, default="{}", show_default=True, help="JSON for timm.create_model.")
@click.option("--images", type=click.IntRange(8), default=32, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def main(bench: Bench, model: str, model_kwargs: dict[str, Any], images: int, threads: int) -> None:
    """Time the command and the necessary passes."""
    torch.set_num_threads(threads)
    bench.share(threads=threads, model=model, model_kwargs=model_kwargs, images=images, batches=list(BATCHES))
    with tempfile.TemporaryDirectory() as scratch:
        path = made(random_checkpoint(model, **model_kwargs), images, Path(scratch))
        passes, whole = needed(Path(scratch), path), verified(Path(scratch), path, threads)
    ratio = whole["cpu_s"] / sum(passes.values())
    for name, value in {"pass_cpu_s": passes, "verify": whole, "ratio": ratio}.items():
        bench.record.set(name, value)
    click.echo(f"verify: {whole['cpu_s']:.1f} CPU s, {ratio:.2f} of the passes needed, {whole['peak_mb']:.0f} MB")


if __name__ == "__main__":
    main()
