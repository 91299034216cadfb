"""How long a sweep that measures takes: 12 trials of the digits example in ONNX Runtime at batches 1 and 16.

    python -m benchmarks.quality.sweep_trials --output benchmarks/results/sweep_trials.json

The command as a user types it, in a process of its own; the seconds of each trial are its own account.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import click

from corp_deploy.demo.run import EXAMPLE, write_images
from corp_deploy.machine import versions
from ground.files import write_json

SPARSITIES = "0.2,0.35,0.5,0.65"
PRESETS = "best,corp-v1,none"


def _command(*words: object) -> float:
    started = perf_counter()
    subprocess.run([sys.executable, "-m", "corp_deploy", *map(str, words), "--quiet"], check=True)
    return perf_counter() - started


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    """Run the sweep and write the record."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_images(home)
        model = ("--model", EXAMPLE / "model")
        _command("calibrate", *model, "--images", home / "calibration.npz", "-o", home / "m.safetensors")
        asked = ("--images", home / "held-out.npz", "--labels", home / "held-out.npz", "--sparsity", SPARSITIES)
        timed = ("--preset", PRESETS, "--bench", "onnxruntime", "--batch", "1,16", "-o", home / "sweep")
        seconds = _command("sweep", *model, "--moments", home / "m.safetensors", *asked, *timed)
        again = _command("sweep", *model, "--moments", home / "m.safetensors", *asked, *timed)
        swept = json.loads((home / "sweep" / "sweep.json").read_text())
    record = {
        "kind": "benchmarks/sweep-trials",
        "version": 1,
        "cpus": os.cpu_count(),
        "load_before": load,
        "versions": versions(),
        "seconds": seconds,
        "seconds_again": again,
        "trials": [
            {
                "preset": trial["preset"],
                "mlp": trial["mlp_sparsity"],
                "relative_error": trial["relative_error"],
                "speedups": {speed["batch"]: speed["speedup"] for speed in trial["speeds"]},
                "disturbed": any(speed["disturbed"] for speed in trial["speeds"]),
                "seconds": {name: each["seconds"] for name, each in trial["effort"].items()},
            }
            for trial in swept["trials"]
        ],
    }
    write_json(output, record)
    click.echo(f"{len(swept['trials'])} trials in {seconds:.0f} s, again {again:.0f} s")


if __name__ == "__main__":
    main()
