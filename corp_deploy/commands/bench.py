"""corp-deploy bench."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation.running import BenchOptions
from corp_deploy.views.console import Output
from ground.errors import EXIT_INCONCLUSIVE

from .declared import record_options
from .input_choice import text_option
from .options import ANY_PATH, FILE, output_options, trust_engine_option, trust_option, value_options

if TYPE_CHECKING:
    from corp_deploy.proof.timed_inputs import TimedInputs


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


@click.command()
@click.argument("dense", type=ANY_PATH)
@click.argument("reduced", type=ANY_PATH)
@click.option("--output", "-o", type=FILE, required=True, help="bench.json to write, raw samples and all.")
@record_options("asked", BenchOptions)
@fed_options
@trust_option
@trust_engine_option
@output_options
def bench(
    dense: Path,
    reduced: Path,
    output: Path,
    asked: BenchOptions,
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
            batches=asked.batches,
            plan=asked.plan,
            running=asked.running,
            fed=fed,
            names=asked.names,
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
