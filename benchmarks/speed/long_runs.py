"""Does memory grow with the number of images or of requests? Two long runs, their memory as they go, and its slope.

1. `calibrate` of DeiT-Ti (random weights) on 5,000 images [3,224,224] float32 from a memory-mapped .npy of 3 GB.
2. 10,000 requests, one after another, to the digits model as `package` writes it, in a real tritonserver.

Memory is what a process (2: the server and its children) holds for itself (RssAnon): pages of the mapped file that the
kernel keeps while there is room are not its own. The slope is Theil and Sen's over all but the first fifth of the run,
with its 95 % interval.

    python -m benchmarks.speed.long_runs --output benchmarks/results/long_runs.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
from click.testing import CliRunner
from numpy.lib.format import open_memmap
from safetensors.torch import save_file
from scipy.stats import theilslopes

from corp_deploy.cli import main as corp_deploy
from corp_deploy.demo.run import EXAMPLE
from corp_deploy.machine import versions
from export.triton.repository import write_repository
from export.triton.server import TritonServer
from export.triton.variants import Package
from ground.files import write_json
from perf.timing.watch import environment
from tests import triton_server

IMAGES, REQUESTS, EVERY = 5_000, 10_000, 50
WRITTEN_AT_ONCE = 100
PAUSE_S = 0.5
MODEL = "deit_tiny_patch16_224"
Point = tuple[float, float]
"""Images or requests done, and MiB."""


def own_mib(process: int) -> float:
    """What this process and its children hold for themselves; 0 when it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0.0
    kib = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return kib / 1024 + sum(own_mib(int(child)) for child in children)


def slope(points: Sequence[Point]) -> dict[str, float]:
    """MiB per 1,000, with its 95 % interval, behind the first fifth."""
    settled = np.array(points[len(points) // 5 :])
    found = theilslopes(settled[:, 1], settled[:, 0] / 1000)
    return {"mib_per_1000": found.slope, "low": found.low_slope, "high": found.high_slope}


def told(points: Sequence[Point], what: str, seconds: float) -> dict[str, Any]:
    """The part of the record."""
    settled = [mib for _, mib in points[len(points) // 5 :]]
    return {
        "of": what,
        "count": points[-1][0],
        "seconds": round(seconds, 1),
        "peak_mib": max(mib for _, mib in points),
        "least_mib": min(settled),
        "slope": slope(points),
        "points": [[round(done), round(mib, 2)] for done, mib in points],
    }


def write_images(path: Path, count: int) -> None:
    """Random images [count,3,224,224] float32, a piece at a time."""
    images = open_memmap(path, mode="w+", dtype=np.float32, shape=(count, 3, 224, 224))
    rng = np.random.default_rng(0)
    for start in range(0, count, WRITTEN_AT_ONCE):
        piece = images[start : start + WRITTEN_AT_ONCE]
        piece[:] = rng.standard_normal(piece.shape, dtype=np.float32)


def calibration(folder: Path, count: int) -> dict[str, Any]:
    """Memory by the time that passed, as images are done at one rate."""
    write_images(folder / "images.npy", count)
    save_file(timm.create_model(MODEL).state_dict(), folder / "weights.safetensors")
    model = ["--model", MODEL, "--weights", f"{folder}/weights.safetensors"]
    words = ["calibrate", *model, "--images", f"{folder}/images.npy", "-o", f"{folder}/moments.safetensors"]
    begun, samples = time.monotonic(), []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "corp_deploy", *words], stdout=log, stderr=log)
        while process.poll() is None:
            samples.append((time.monotonic() - begun, own_mib(process.pid)))
            time.sleep(PAUSE_S)
    if process.returncode:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    seconds = samples[-1][0]
    (folder / "images.npy").unlink()
    # The last samples are of writing the moments.
    points = [(at / seconds * count, mib) for at, mib in samples if mib]
    return told(points, f"calibrate, {count:,} images [3,224,224] from a memory map", seconds)


def serving(folder: Path, count: int) -> dict[str, Any]:
    """Memory of the server by requests that it answered."""
    graph = folder / "model.onnx"
    done = CliRunner().invoke(corp_deploy, ["export", "--model", str(EXAMPLE / "model"), "-o", str(graph)])
    if done.exit_code:
        raise RuntimeError(done.output)
    write_repository(Package(name="digits", cpu_onnx=graph), folder / "repository")
    name = next((folder / "repository").iterdir()).name
    rng, points = np.random.default_rng(0), []
    with triton_server.Server(folder / "repository", folder) as running:
        server = TritonServer(address=f"http://{running.http_address}")
        server.load(name)
        (images,) = server.input_names(name, 1)
        shape = json.loads(json.dumps(running.ask(f"models/{name}")[1]))["inputs"][0]["shape"][1:]
        begun = time.monotonic()
        for request in range(count):
            server.infer(name, 1, {images: rng.standard_normal((1, *shape), dtype=np.float32)})
            if request % EVERY == EVERY - 1:
                points.append((float(request + 1), own_mib(running.process.pid)))
        seconds = time.monotonic() - begun
    return told(points, f"tritonserver, {count:,} requests to the digits model on the CPU", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    arguments = parser.parse_args()
    runs = {"calibration": (calibration, arguments.images), "serving": (serving, arguments.requests)}
    record: dict[str, Any] = {"kind": "long-runs", "version": 1}
    if arguments.output.is_file():
        record = json.loads(arguments.output.read_text())
    for name, (run, count) in runs.items():
        if name in record:
            continue
        if name == "serving" and (why := triton_server.lack()):
            print(f"no server: {why}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            record[name] = run(Path(folder), count)
        write_json(arguments.output, record | {"environment": environment(), "versions": versions()}, indent=1)
        print(name, {key: value for key, value in record[name].items() if key != "points"}, flush=True)


if __name__ == "__main__":
    main()
