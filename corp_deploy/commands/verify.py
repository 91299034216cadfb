"""The commands verify, bench and bench compare."""

import sys
from pathlib import Path
from typing import Annotated

import click

from corp_deploy.invocation.input_choice import KINDS
from corp_deploy.invocation.running import BenchFiles, BenchOptions, DecoderLoad, FedOptions
from corp_deploy.invocation.table import BENCH_OF, VERIFY_REFERENCE
from corp_deploy.views.console import Output
from ground.errors import EXIT_INCONCLUSIVE, EXIT_NOT_COMPARABLE

from .command import ModelChoice, as_directory, command, some
from .decoder import bench_graphs, verify_graph
from .options import ANY_PATH, FILE, explicit_options, trust_engine_option, trust_option, usage_errors
from .verify_run import ProofInputChoice, VerifyRun, show_proof


def _is_decoder_graph(path: Path) -> bool:
    if not path.is_dir():
        return False
    from corp_deploy.families.decoder_builder import SETTINGS

    return (path / SETTINGS).is_file()


@command(first="weights images random labels samples output batch min-agreement max-error hold-out")
@click.argument("model", metavar="REFERENCE")
@click.argument("candidates", nargs=-1, type=ANY_PATH)
@trust_engine_option
def verify_command(
    model: ModelChoice,
    candidates: tuple[Path, ...],
    inputs: Annotated[ProofInputChoice, some(*KINDS, "random", "labels", "samples", "seed", "hold_out", "groups")],
    options: VerifyRun,
    out: Output,
) -> int:
    """Compare CANDIDATES with REFERENCE on real inputs. Name REFERENCE as you name --model of other commands.

    A link compares two steps of the chain from REFERENCE to the last candidate; exit code 1 when one fails.
    --min-agreement and --max-error apply to every output of the model, --output-limit to one of them. The verdict is
    PASS only if limits judged every output from REFERENCE to the last candidate; otherwise it is UNJUDGED (exit code
    3). --exclude-output names an output that need not be judged.

    An agreement is a share of inputs and has an interval: the link passes if no part of it lies below the limit, and
    fails if all of it does; in between it is INCONCLUSIVE (exit 3), and the message says how many inputs would decide.
    gate judges in the same way, with its own --confidence. If there are too few inputs to show the limit at all, a
    warning comes first.

    A separate dense head (--head) is run on the named outputs of every step; its maps are links of their own: relative
    error, intersection over union, pixels that agree.

    A directory of export-decoder is compared with transformers in FP32 on the directory that it was built from
    (--random 2): all tokens at once, then token by token with the key/value cache. Without --max-error the limit of an
    FP32 graph is 1e-4, and others are only measured.

    Give the candidates in the order they were made: reduced directory, FP32 graph, FP16 graph.

    REFERENCE is whatever --model of other commands takes: a directory, hf:DIR, a timm name with --weights, or a .toml
    with [model] (a recipe, or the file that calibrate writes beside moments).

    With a .plan (or .onnx) as REFERENCE, engines of the same graph are compared with it; exit 5 if they were built from
    other graphs. If two versions need separate environments, --write-golden saves the outputs of the first, and its
    directory is the REFERENCE in the second.

    Example: corp-deploy verify dense reduced reduced/model.onnx reduced/model.fp16.onnx --images photos/ -o parity.json
    """
    from corp_deploy.proof.limits import ParityLimits
    from corp_deploy.store.hub_snapshot import PREFIX

    limits = ParityLimits.from_options(options.values)
    of_engines = Path(model.model).suffix in (".plan", ".onnx") or (Path(model.model) / "golden.json").exists()
    of_graph = not of_engines and len(candidates) == 1 and _is_decoder_graph(candidates[0])
    way = "engine" if of_engines else "decoder" if of_graph else "model"
    VERIFY_REFERENCE.refuse([(model.model, way)], explicit_options())
    if of_engines:
        return options.compare(Path(model.model), candidates, inputs, limits, out)
    if of_graph:
        directory, output = Path(model.model.removeprefix(PREFIX)), options.record_of(candidates)
        return verify_graph(directory, candidates[0], output, options, inputs, out)
    from corp_deploy.proof.candidates import require_batches, with_preprocessing
    from corp_deploy.proof.custom_metrics import require_runnable
    from corp_deploy.proof.prove import candidates_from_paths, run_proof
    from corp_deploy.proof.second_opinion import require_second_opinion, write_second_opinion

    inputs.require()
    output = options.record_of(candidates)
    require_runnable(options.metrics)
    steps = candidates_from_paths(candidates, options.runtimes)
    dense = model.load(out)
    if options.polygraphy is not None:
        require_second_opinion(steps)
    if "batch" in explicit_options():
        for sentence in require_batches(steps, options.batches):
            out.warn(sentence)
    proof_inputs = inputs.of_model(dense, out.note, pixels=any(step.takes_pixels for step in steps))
    with out.progress("verifying", len(steps), unit="links") as bar:
        proof = run_proof(
            dense,
            steps,
            proof_inputs,
            limits,
            output=output,
            moments_file=None if options.moments is None else Path(options.moments),
            metrics=options.metrics,
            metric_time_limit_s=options.metric_time_limit,
            warn=out.warn,
            on_progress=bar,
        )
    again: list[str] = []
    if (there := options.polygraphy) is not None:
        written = write_second_opinion(
            proof, with_preprocessing(steps, dense), proof_inputs.feeds, there, batch=max(options.batches)
        )
        again = [f"in {there}:", *written]
    return show_proof(proof.parity, out, *again)


@command(first="output batch backend device provider threads time-limit half-width images names")
@click.argument("dense", type=ANY_PATH)
@click.argument("reduced", type=ANY_PATH)
@trust_option
@trust_engine_option
def bench_command(
    dense: Path,
    reduced: Path,
    files: BenchFiles,
    options: BenchOptions,
    of_decoders: DecoderLoad,
    fed: FedOptions,
    out: Output,
) -> int:
    """Time DENSE against REDUCED, interleaved in one process. DENSE against itself (A/A) shows the noise.

    Both are .onnx files, .plan engines, model directories, or .pt2 packages of AOTInductor, which are code (they need
    --trust-code, and --images FILE.npy as inputs). DENSE may also be a .toml with [model], as calibrate writes it. Exit
    code 3 if no batch size could be measured in time.

    Memory layout, an engine's tactics and thread placement differ between processes: --launches 5 measures in five.

    Directories of export-decoder, or plain ones of transformers, which are exported to FP32 first, are timed by prefill
    and decoding; the time limit applies to each length and each batch size.

    Example: corp-deploy bench dense/model.onnx reduced/model.onnx --batch 1,8,32 -o bench.json
    """
    from corp_deploy.proof.speed import bench_models
    from corp_deploy.views.speed import (
        best_batch,
        energy_lines,
        launch_lines,
        repeat_lines,
        speed_record,
        speed_table,
    )

    output = None if files.output is None else Path(files.output)
    of_graphs = _are_of_decoders(dense, reduced)
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
        measured = bench_models(
            dense_run,
            reduced_run,
            options,
            fed=fed,
            output=output,
            command=["corp-deploy", *sys.argv[1:]],
            progress=lambda share, _: bar(int(100 * share)),
        )
        bar(100)
    for warning in measured.warnings:
        out.warn(warning)
    lines = (*launch_lines(measured), *energy_lines(measured), *repeat_lines(measured), *best_batch(measured))
    out.result(speed_record(measured), speed_table(measured), *lines)
    return 0 if measured.is_timed else EXIT_INCONCLUSIVE


def _are_of_decoders(*paths: Path) -> bool:
    """Return True if one of the paths is a directory of a decoder or of its graph."""
    directories = [path for path in paths if path.is_dir()]
    if not directories:
        return False
    from corp_deploy.store.decoder_graph import is_of_decoder

    return any(map(is_of_decoder, directories))


@command("bench compare")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
def compare_command(before: Path, after: Path, out: Output) -> int:
    """Put two bench records side by side.

    Differences of the machines come first, then the figures. Exit codes: 0, or 5 if machines or settings differ so that
    the figures are not comparable.

    Example: corp-deploy bench compare last-week.json bench.json
    """
    from corp_deploy.proof.gate import comparison_as_json
    from perf.record.runs import load_bench
    from perf.stats.compare import compare_records, markdown_from_comparison

    comparison = compare_records(load_bench(before), load_bench(after))
    out.result(comparison_as_json(comparison), markdown_from_comparison(comparison))
    return 0 if comparison.comparable else EXIT_NOT_COMPARABLE
