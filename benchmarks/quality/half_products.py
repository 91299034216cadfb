"""What a dense model's own error in FP16 takes on a CPU: torch's half products beside those in float32, rounded once.

    python -m benchmarks.quality.half_products --output benchmarks/results/half_products.json

Models with random weights, interleaved on the same images in one process; errors are from the FP32 model's outputs.
"""

import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import timm
import torch

from corp_deploy.machine import versions
from corp_deploy.proof.own_noise import HalfProducts
from ground.files import write_json
from perf.timing.watch import cpu_name

MODELS = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet18")


@torch.no_grad()
def measured(name: str, images: int, rounds: int) -> dict[str, Any]:
    """Seconds of either way, and the relative error of what each gives."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    config: Any = model.pretrained_cfg
    shown = torch.randn(images, *config["input_size"])
    exact, half = model(shown), model.half()
    ways = {"half": nullcontext, "float32": HalfProducts}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    errors: dict[str, float] = {}
    for _ in range(rounds):
        for way, context in ways.items():
            began = time.perf_counter()
            with context():
                given = half(shown.half())
            seconds[way].append(time.perf_counter() - began)
            errors[way] = float((given - exact).norm() / exact.norm())
    ratios = [one / other for one, other in zip(seconds["half"], seconds["float32"], strict=True)]
    return {"model": name, "seconds": seconds, "relative_error": errors, "times_as_fast": statistics.median(ratios)}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--images", default=4, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(output: Path, images: int, rounds: int) -> None:
    torch.set_num_threads(1)
    rows = [measured(name, images, rounds) for name in MODELS]
    facts = {"images": images, "threads": 1, "cpu": cpu_name(), "versions": versions()}
    write_json(output, {"kind": "benchmarks/half-products", "version": 1, **facts, "rows": rows})
    for row in rows:
        print(f"{row['model']}: {row['times_as_fast']:.1f} times as fast")


if __name__ == "__main__":
    main()
