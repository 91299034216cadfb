"""corp-deploy bench."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation.running import RunOptions
from corp_deploy.invocation.table import BENCH
from corp_deploy.views.console import Output
from ground.errors import EXIT_INCONCLUSIVE
from ground.quantities import MILLISECONDS, ROUNDS, SECONDS, SHARE_KEPT, STREAMS, THREADS

from .input_choice import text_option
from .numbers import Number
from .options import (
    ANY_PATH,
    BATCHES,
    FILE,
    explicit_options,
    output_options,
    trust_engine_option,
    trust_option,
    value_options,
)

if TYPE_CHECKING:
    from corp_deploy.proof.timed_inputs import TimedInputs
    from perf.timing.laps import Plan


def _run_options(**_: object) -> RunOptions:
    """As typed, since a default is no wish."""
    return RunOptions.from_options(explicit_options())


run_options = value_options(
    "running",
    _run_options,
    click.option(
        "--backend",
        type=click.Choice(["onnxruntime", "openvino", "torch", "aotinductor"]),
        default="onnxruntime",
        show_default=True,
        help="What runs them; a model directory is exported to FP32 first for onnxruntime and openvino, compiled first "
        "for aotinductor.",
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        show_default=True,
        help=f"Where torch runs them; for the others, where they must run. {BENCH.help('device')}",
    ),
    click.option(
        "--provider",
        type=click.Choice(["cpu", "cuda", "tensorrt"]),
        default="cpu",
        show_default=True,
        help="ONNX Runtime's execution provider; another than asked for is never used in its place. "
        + BENCH.help("provider"),
    ),
    click.option(
        "--mode",
        type=click.Choice(["eager", "compiled", "cuda_graph"]),
        default="eager",
        show_default=True,
        help=BENCH.help("mode"),
    ),
    click.option(
        "--dtype",
        type=click.Choice(["fp32", "fp16", "bf16"]),
        default="fp32",
        show_default=True,
        help="What torch casts weights to and what OpenVINO computes in, whatever the file holds; other graphs and "
        f"engines have theirs. {BENCH.help('dtype')}",
    ),
    click.option("--streams", type=Number(STREAMS), default=1, show_default=True, help="Above 1: throughput only."),
    click.option(
        "--flush-l2", is_flag=True, help=f"Overwrite the GPU's L2 cache before each call. {BENCH.help('flush_l2')}"
    ),
    click.option(
        "--threads",
        type=Number(THREADS),
        default=None,
        help=f"CPU threads of both; default: the runtime's choice. {BENCH.help('threads')}",
    ),
)


def _plan(time_limit: float, half_width: float, block_ms: float, min_rounds: int, audit: bool) -> "Plan":
    from perf.timing.laps import AUDIT_ROUNDS, Plan

    return Plan(
        time_limit_s=time_limit,
        half_width_rel=half_width,
        block_ms=block_ms,
        min_rounds=min_rounds,
        audit_rounds=AUDIT_ROUNDS * audit,
    )


plan_options = value_options(
    "plan",
    _plan,
    click.option(
        "--time-limit",
        type=Number(SECONDS),
        default=20.0,
        show_default=True,
        help="Seconds per batch size, at most, with loading, warm-up and A/A run; a call under way is not broken off. "
        "A batch size that takes longer is reported as not measured.",
    ),
    click.option(
        "--half-width",
        type=Number(SHARE_KEPT),
        default=0.01,
        show_default=True,
        help="Stop when the speed-up is known this well (share of its value, either side).",
    ),
    click.option(
        "--block-ms", type=Number(MILLISECONDS), default=25.0, show_default=True, help="How long a block lasts."
    ),
    click.option(
        "--min-rounds", type=Number(ROUNDS), default=16, show_default=True, help="Rounds at least, of 4 blocks."
    ),
    click.option(
        "--audit",
        is_flag=True,
        help="Time each on one batch again and again against varied ones, too: what answers out of a cache is told, "
        "and no gate decides by it.",
    ),
)


def _fed(images: Path | None, text: Path | None) -> "TimedInputs":
    from corp_deploy.proof.timed_inputs import TimedInputs

    if images is not None and text is not None:
        raise click.UsageError("--images and --text exclude each other; give what the models take")
    return TimedInputs(images=images, text=text)


fed_options = value_options(
    "fed",
    _fed,
    click.option(
        "--images",
        type=FILE,
        default=None,
        help="Feed these, over again where they are few: .npy, .npz or .safetensors as for verify; default: noise.",
    ),
    text_option(help="Feed these texts, a line each, by a model directory's tokenizer; default: any tokens."),
)


def _two_names(_: click.Context, __: click.Parameter, text: str) -> tuple[str, str]:
    """As rules of the gate can spell them."""
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != 2 or not all(re.fullmatch(r"[A-Za-z][\w-]{0,63}", name) for name in names):
        raise click.BadParameter(f"{text[:100]!r} is not two names of letters, digits and dashes, such as fp16,int8")
    return names[0], names[1]


@click.command()
@click.argument("dense", type=ANY_PATH)
@click.argument("reduced", type=ANY_PATH)
@click.option("--output", "-o", type=FILE, required=True, help="bench.json to write, raw samples and all.")
@click.option("--batch", type=BATCHES, default="1,8,32", show_default=True, help="Batch sizes to measure.")
@click.option(
    "--names",
    callback=_two_names,
    default="dense,reduced",
    show_default=True,
    help="What the two are called in the record, such as fp16,int8.",
)
@run_options
@plan_options
@fed_options
@trust_option
@trust_engine_option
@output_options
def bench(
    dense: Path,
    reduced: Path,
    output: Path,
    batch: tuple[int, ...],
    names: tuple[str, str],
    running: RunOptions,
    plan: "Plan",
    fed: "TimedInputs",
    out: Output,
) -> None:
    """Time DENSE against REDUCED in one process, interleaved, with an A/A run of DENSE beside it.

    Both are .onnx files, .plan engines, model directories, or .pt2 packages of AOTInductor, which are code
    (--trust-code, with --images FILE.npy of what they take). Exit code 3 where no batch size could be measured in time.

    Example: corp-deploy bench dense/model.onnx reduced/model.onnx --batch 1,8,32 -o bench.json
    """
    from corp_deploy.proof.speed import measure
    from corp_deploy.views.speed import best_batch, repeat_lines, speed_record, speed_table
    from ground.files import replacing
    from perf.record.runs import save_bench

    with out.progress("measuring", 100, unit="%") as done:
        measured = measure(
            dense,
            reduced,
            batches=batch,
            plan=plan,
            running=running,
            fed=fed,
            names=names,
            command=["corp-deploy", *sys.argv[1:]],
            progress=lambda share, _: done(int(100 * share)),
        )
        done(100)
    with replacing(output) as temporary:
        save_bench(measured, temporary)
    for warning in measured.warnings:
        out.warn(warning)
    out.result(speed_record(measured), speed_table(measured), *repeat_lines(measured), *best_batch(measured))
    if not measured.is_timed:
        click.get_current_context().exit(EXIT_INCONCLUSIVE)
