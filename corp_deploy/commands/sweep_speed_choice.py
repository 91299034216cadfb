"""What trials of a sweep are timed in and built for, on the command line."""

from typing import Any

import click

from corp_deploy.invocation.sweep_speed import BENCH, SweepSpeedChoice
from ground.quantities import SECONDS, SHARE_KEPT, THREADS

from .numbers import Number
from .options import BATCHES, explicit_options, usage_errors, value_options


def _speed_choice(**options: Any) -> SweepSpeedChoice:
    with usage_errors():
        choice = SweepSpeedChoice(**options)
        choice.refuse_ignored(explicit_options())
    return choice


speed_options = value_options(
    "speed",
    _speed_choice,
    click.option(
        "--bench",
        type=click.Choice(["onnxruntime", "openvino", "torch", "engine"]),
        default=None,
        help="Time every trial beside the dense model, interleaved in one process, in this runtime; engine: in the "
        "engines that --engine builds, on a GPU. Default: nothing is timed.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["tensorrt", "tensorrt-rtx"]),
        default=None,
        help="Build an FP16 engine of every trial: its size and fused attentions stand in the table. TensorRT-RTX "
        "needs no GPU for that.",
    ),
    click.option("--sm", multiple=True, help="A target of TensorRT-RTX such as 89; repeat."),
    click.option(
        "--batch",
        type=BATCHES,
        default="1,16",
        show_default=True,
        help="Batch sizes that are timed, and that engines take.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "fp16", "bf16"]),
        default="fp32",
        show_default=True,
        help=f"Of what is timed; engines are FP16. {BENCH.help('precision')}",
    ),
    click.option(
        "--threads", type=Number(THREADS), default=None, help=f"CPU threads of what is timed. {BENCH.help('threads')}"
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        show_default=True,
        help="Where trials are timed.",
    ),
    click.option(
        "--time-limit",
        type=Number(SECONDS),
        default=5.0,
        show_default=True,
        help="Seconds per trial and batch size, at most, with loading, warm-up and A/A run.",
    ),
    click.option(
        "--half-width",
        type=Number(SHARE_KEPT),
        default=0.02,
        show_default=True,
        help="Stop when a speed-up is known this well.",
    ),
)
