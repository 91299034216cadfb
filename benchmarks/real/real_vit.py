"""Every method on a DINOv2 ViT-S/14 with real weights, on photographs, with an unchanged saliency head.

    make real
    python -m benchmarks.real.real_vit --output benchmarks/results/real_vit.json

The model is calibrated on crops of 37 photographs and judged on crops of 16 others. The cost of a reduction is given in
CPU seconds and in bare forward passes over the same crops, without the moments, which all methods share.
"""

import tempfile
from pathlib import Path

import click
import torch

from benchmarks.harness import Bench, measures
from benchmarks.real.encoder import METHODS, Encoder
from corp_deploy.families.counting import macs
from ground.errors import Missing

OVERFITTING = ("best", "best, closed loop")
OVERFITTING_SHARE, PHOTOGRAPHS = 0.8, (5, 10, 20, 37)


@measures("benchmarks/real-vit")
@click.option("--shares", default="0.9,0.8,0.7,0.66,0.6,0.5", show_default=True)
@click.option("--photographs", is_flag=True, help="Fit to the crops of fewer photographs instead.")
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To calibrate on.")
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="Crops to judge by.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(bench: Bench, shares: str, photographs: bool, crops: int, held_out: int, threads: int) -> None:
    """Reduce by each method at each share."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            encoder = Encoder.opened(Path(scratch), crops, held_out)
        except Missing as reason:
            click.echo(f"skipped: {reason}")
            return
        bench.share(model="DINOv2 ViT-S/14, 224 pixels", threads=threads, dense_macs=macs(encoder.model))
        bench.share(calibration={"crops": crops, "photographs": 37}, held_out={"crops": held_out, "photographs": 16})
        for method in METHODS:
            for share in (float(each) for each in shares.split(",") if not photographs):
                if share in method.shares:
                    bench.row({"method": method.name, "share": share}, encoder.row, method, share)
            for count in PHOTOGRAPHS if photographs and method.name in OVERFITTING else ():
                key = {"method": method.name, "share": OVERFITTING_SHARE, "photographs": count}
                fewer = encoder.of_photographs(count)
                bench.row(key, fewer.fitted_row, method, OVERFITTING_SHARE, part="photographs")


if __name__ == "__main__":
    main()
