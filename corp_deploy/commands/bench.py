"""corp-deploy bench and corp-deploy bench compare."""

import sys
from pathlib import Path
from typing import Annotated

import click

from corp_deploy.invocation.running import BenchFiles, BenchOptions, DecoderLoad, FedOptions
from corp_deploy.invocation.table import BENCH_OF
from corp_deploy.views.console import Output
from ground.errors import EXIT_INCONCLUSIVE, EXIT_NOT_COMPARABLE

from .command import command, some
from .decoder import bench_graphs
from .model_choice import as_directory
from .options import ANY_PATH, FILE, explicit_options, trust_engine_option, trust_option, usage_errors


@command(first="output batch backend device provider threads time-limit half-width images names")
@click.argument("dense", type=ANY_PATH)
@click.argument("reduced", type=ANY_PATH)
@trust_option
@trust_engine_option
def bench(
    dense: Path,
    reduced: Path,
    files: Annotated[BenchFiles, some(needed="output")],
    options: BenchOptions,
    of_decoders: DecoderLoad,
    fed: FedOptions,
    out: Output,
) -> int:
    """Time DENSE against REDUCED, interleaved in one process. DENSE against itself (A/A) shows the noise.

    Both are .onnx files, .plan engines, model directories, or .pt2 packages of AOTInductor, which are code (they need
    --trust-code, and --images FILE.npy as inputs). DENSE may also be a .toml with [model], as calibrate writes it. Exit
    code 3 if no batch size could be measured in time.

    Directories of export-decoder, or plain ones of transformers, which are exported to FP32 first, are timed by prefill
    and decoding; the time limit applies to each length and each batch size.

    Example: corp-deploy bench dense/model.onnx reduced/model.onnx --batch 1,8,32 -o bench.json
    """
    from corp_deploy.proof.speed import measure
    from corp_deploy.store.decoder_graph import is_of_decoder
    from corp_deploy.views.speed import best_batch, repeat_lines, speed_record, speed_table
    from ground.files import replacing
    from perf.record.runs import save_bench

    assert files.output is not None, files
    output = Path(files.output)
    of_graphs = is_of_decoder(dense) or is_of_decoder(reduced)
    with usage_errors():
        BENCH_OF.refuse([("", "decoders" if of_graphs else "models")], explicit_options())
    if of_graphs:
        timed = bench_graphs(dense, reduced, output, options, of_decoders, out)
        return 0 if timed else EXIT_INCONCLUSIVE
    with (
        as_directory(dense, out) as dense_run,
        as_directory(reduced, out) as reduced_run,
        out.progress("measuring", 100, unit="%") as bar,
    ):
        measured = measure(
            dense_run,
            reduced_run,
            batches=options.batches,
            plan=options.plan,
            running=options.running,
            fed=fed,
            names=options.names,
            command=["corp-deploy", *sys.argv[1:]],
            progress=lambda share, _: bar(int(100 * share)),
        )
        bar(100)
    with replacing(output) as temporary:
        save_bench(measured, temporary)
    for warning in measured.warnings:
        out.warn(warning)
    out.result(speed_record(measured), speed_table(measured), *repeat_lines(measured), *best_batch(measured))
    return 0 if measured.is_timed else EXIT_INCONCLUSIVE


@command("bench compare")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
def compare(before: Path, after: Path, out: Output) -> int:
    """Put two bench records side by side.

    Differences of the machines come first, then the figures. Exit codes: 0, or 5 if machines or settings differ so that
    the figures are not comparable.

    Example: corp-deploy bench compare last-week.json bench.json
    """
    from corp_deploy.proof.gate import comparison_as_json
    from perf.record.runs import load_bench
    from perf.stats.compare import compare as compare_records
    from perf.stats.compare import markdown_from_comparison

    comparison = compare_records(load_bench(before), load_bench(after))
    out.result(comparison_as_json(comparison), markdown_from_comparison(comparison))
    return 0 if comparison.comparable else EXIT_NOT_COMPARABLE
