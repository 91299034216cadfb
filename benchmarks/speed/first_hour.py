"""What the commands of the main job take on a CPU: calibrate, reduce by a budget, export, verify, each a process.

    python -m benchmarks.speed.first_hour --output benchmarks/results/first_hour.json [--beside CHECKOUT]

DeiT-S with random weights and drawn images: times don't depend on their values. With `--beside` another checkout of
this project does the same in turns, command by command, so that both have the machine as the other has it.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from corp_deploy.machine import versions
from ground.files import write_json

ROOT = Path(__file__).resolve().parents[2]
MODEL = "deit_small_patch16_224"
BUDGET = "0.7"


def subject(model: str, images: int, home: Path) -> None:
    """Random weights, and photographs' stand-ins of 252 x 252."""
    torch.manual_seed(0)
    save_file(timm.create_model(model).state_dict(), home / "weights.safetensors")
    (home / "images").mkdir()
    generator = np.random.default_rng(0)
    for number in range(images):
        coarse = np.kron(generator.normal(size=(3, 14, 14)), np.ones((1, 18, 18)))
        pixels = np.clip(40 * (coarse + 0.3 * generator.normal(size=coarse.shape)) + 128, 0, 255)
        Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0)).save(home / "images" / f"{number:03}.png")


def commands(model: str, home: Path, out: Path) -> dict[str, list[str]]:
    """The words of each command, by its name here."""
    weights, images = ["--weights", str(home / "weights.safetensors")], ["--images", str(home / "images")]
    dense, moments, reduced = ["--model", model, *weights], str(out / "m.safetensors"), str(out / "reduced")
    of_reduced = str(out / "reduced.onnx")
    return {
        "calibrate": ["calibrate", *dense, *images, "-o", moments],
        "reduce": ["reduce", *dense, *images, "--moments", moments, "--macs", BUDGET, "-o", reduced],
        "export dense": ["export", *dense, "-o", str(out / "dense.onnx")],
        "export reduced": ["export", "--model", reduced, "-o", of_reduced],
        "verify": ["verify", model, *weights, reduced, of_reduced, *images, "-o", str(out / "parity.json")],
    }


def timed(words: list[str], checkout: Path) -> dict[str, float]:
    """Of one process, that has to end well."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-m", "corp_deploy", *words, "--quiet"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise click.ClickException(f"{words[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return {"wall_s": took, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measured(model: str, images: int, rounds: int, checkouts: Mapping[str, Path]) -> dict[str, Any]:
    """The record's figures: of each round, command and checkout, and the sizes of the moments."""
    found: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            subject(model, images, home)
            of_sides = {side: commands(model, home, home / side) for side in checkouts}
            for side in checkouts:
                (home / side).mkdir()
            for name in next(iter(of_sides.values())):
                for side, checkout in checkouts.items():
                    row = {"round": number, "side": side, "command": name}
                    found.append({**row, **timed(of_sides[side][name], checkout)})
            sizes |= {side: (home / side / "m.safetensors").stat().st_size for side in checkouts}
    return {"rows": found, "moments_bytes": sizes}


def medians(rows: list[dict[str, Any]], figure: str = "wall_s") -> dict[str, dict[str, float]]:
    """Of each command by side."""
    names, sides = (dict.fromkeys(row[key] for row in rows) for key in ("command", "side"))
    return {
        name: {
            side: statistics.median(row[figure] for row in rows if (row["command"], row["side"]) == (name, side))
            for side in sides
        }
        for name in names
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--model", default=MODEL, show_default=True)
@click.option("--images", type=click.IntRange(8), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--beside", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Another checkout.")
def main(output: Path, model: str, images: int, rounds: int, beside: Path | None) -> None:
    """Measure and write the record."""
    checkouts = {"this": ROOT} if beside is None else {"former": beside.resolve(), "this": ROOT}
    found = measured(model, images, rounds, checkouts)
    record = {"kind": "benchmarks/first-hour", "version": 1, "versions": versions(), "model": model, "images": images}
    write_json(output, record | found)
    for name, of_sides in medians(found["rows"]).items():
        click.echo(f"{name}: " + ", ".join(f"{side} {seconds:.0f} s" for side, seconds in of_sides.items()))


if __name__ == "__main__":
    main()
