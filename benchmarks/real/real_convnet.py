"""EfficientNet-Lite0 with real weights, reduced to shares of its MACs, on photographs.

    make real
    python -m benchmarks.real.real_convnet --output benchmarks/results/real_convnet.json

It is calibrated on crops of 37 photographs and judged on crops of 16 others, by the relative error of the logits and by
the agreement of the top class with the dense model. Uniform rows remove the same share of all channels, the least whole
percent that leaves at most the share; rows `by site` have a budget.
"""

import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import Subject, efficientnet, outputs, relative_errors
from corp_deploy.families.counting import macs, parameters
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.traced.models.narrowed_model import at_widths

SHARES = (0.8, 0.66, 0.5)
ALIGN = {"mlp": 64, "head": 16, "conv": 8}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "none": {"preset": "none"},
    "corp": {"preset": "corp"},
    "grail": {"preset": "grail"},
    "grail, REPAIR": {"preset": "grail", "rescale": True},
    "grail, symmetric loop": {"preset": "grail", "closed_loop": "symmetric"},
    "best": {"preset": "best"},
    "best, closed loop": {"preset": "best", "closed_loop": "asymmetric"},
    "best, by site": {"preset": "best"},
    "best, by site, closed loop": {"preset": "best", "closed_loop": "asymmetric"},
}


def share_left(model: nn.Module, sparsity: float) -> float:
    """Return the share of the MACs that is left when this share of all channels is removed."""
    widths = uniform_widths(model, method_from_preset("best", conv_sparsity=sparsity, align_conv=ALIGN["conv"]))
    return macs(at_widths(model, widths)) / macs(model)


def uniform_sparsity(model: nn.Module, share: float) -> float:
    """Return the least sparsity, in percent steps, that leaves at most this share of the MACs."""
    return bisect_left(range(100), -share, key=lambda percent: -share_left(model, percent / 100)) / 100


def row_of(subject: Callable[[], Subject], name: str, share: float) -> dict[str, Any]:
    """Make one reduction and judge it."""
    own = subject()
    dense, moments = own.dense.model, own.moments
    widths = {"macs": share} if "by site" in name else {"conv": uniform_sparsity(dense, share)}
    asked = build_request(ReduceOptions.from_options({**ROWS[name], **widths, "align": ALIGN}))
    started = time.process_time()
    model = reduce_as_asked(own.dense, moments, asked, images=own.inputs)[0].model
    cpu_s = time.process_time() - started
    logits = outputs(model, own.held_out)
    return {
        "macs_share": macs(model) / macs(dense),
        "parameters": parameters(model),
        "error": relative_errors(logits, own.answers)[0],
        "agreement": float((logits.argmax(1) == own.answers.argmax(1)).double().mean()),
        "cpu_s": cpu_s,
    }


@measures("benchmarks/real-convnet")
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To calibrate on.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(bench: Bench, crops: int, threads: int) -> None:
    """Reduce by each method at each share."""
    torch.set_num_threads(threads)
    bench.share(model="EfficientNet-Lite0, 224 pixels", threads=threads, crops=crops, held_out=128)
    with tempfile.TemporaryDirectory() as scratch:
        subject = cache(partial(efficientnet, Path(scratch), crops, 128))
        for share in SHARES:
            for name in ROWS:
                bench.row({"method": name, "share": share}, row_of, subject, name, share)


if __name__ == "__main__":
    main()
