"""The commands export-decoder and perplexity, and verify and bench for graphs of decoders."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click

from corp_deploy.invocation.export_choice import DecoderExport
from corp_deploy.invocation.input_choice import RequiredInputs
from corp_deploy.invocation.proof import LanguageOptions
from corp_deploy.invocation.running import BenchOptions, DecoderLoad
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED
from ground.files import write_json
from ground.quantity import BATCH

from .command import ModelChoice, command, some
from .options import ANY_PATH, DIRECTORY, FILE, Value
from .verify_run import ProofInputChoice, VerifyRun


@command("export-decoder")
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for the graph and its settings.")
def export_decoder_command(directory: Path, output: Path, options: DecoderExport, out: Output) -> None:
    """Write a decoder's ONNX graph with a key/value cache. The builder of onnxruntime-genai makes it.

    DIRECTORY is a directory of transformers with a Llama, Mistral, Qwen2 or Qwen3: the dense model, or a model that
    reduce --save-as hf has written.

    Example: corp-deploy export-decoder reduced/hf -o reduced/onnx --baseline dense
    """
    from corp_deploy.store.decoder_graph import cache_of_directory, export_decoder, facts_of_graph
    from corp_deploy.views.decoders import bytes_in_words, cache_record, cache_table

    caches = (
        {} if options.baseline is None else {"dense": cache_of_directory(options.baseline, precision=options.precision)}
    )
    with out.progress("building", 1, unit="graph") as bar:
        graph = export_decoder(directory, output, precision=options.precision)
        bar(1)
    caches["this model" if options.baseline is None else "reduced"] = graph.cache
    records = {name: cache_record(cache, length=options.length, batch=options.batch) for name, cache in caches.items()}
    record: dict[str, Any] = {**facts_of_graph(graph), "precision": options.precision, "caches": records}
    message = f"{graph.path}: {options.precision}, {bytes_in_words(graph.size_bytes)} with its weights"
    out.result(record, message, cache_table(caches, length=options.length, batch=options.batch))


def verify_graph(
    directory: Path, graph: Path, output: Path, options: VerifyRun, inputs: ProofInputChoice, out: Output
) -> int:
    """Compare a graph's logits on random tokens with transformers' in FP32; write the record; return the exit code."""
    from corp_deploy.proof.decoder_parity import draw_ids, verify_decoder
    from corp_deploy.store.decoder_graph import graph_of_directory
    from corp_deploy.views.decoders import decoder_parity_table

    if inputs.random is None:
        raise click.UsageError("a decoder's graph is compared on random tokens; give a number of sequences: --random 2")
    opened = graph_of_directory(graph)
    ids = draw_ids(opened.vocabulary, sequences=inputs.random, length=options.length, seed=inputs.seed)
    with out.progress("comparing", 1, unit="graph") as bar:
        parity = verify_decoder(directory, opened, ids, provider=options.provider, max_error=options.max_error)
        bar(1)
    write_json(output, parity.as_json())
    out.result(parity.as_json(), decoder_parity_table(parity))
    return 0 if parity.passed else EXIT_FAILED


def bench_graphs(
    dense: Path, reduced: Path, output: Path | None, options: BenchOptions, of_decoders: DecoderLoad, out: Output
) -> bool:
    """Time and print prefill and decoding of both models; return True if a length or batch size could be timed."""
    from corp_deploy.proof.decoder_parity import measure_decoders
    from corp_deploy.views.decoders import cache_table, decode_table, decoder_record, prefill_table
    from perf.record.decoders import save_decoder_bench

    provider: Literal["cpu", "cuda"] = "cuda" if options.provider == "cuda" else "cpu"
    load = replace(of_decoders, batches=options.batches, provider=provider, threads=options.threads)
    with out.progress("measuring", 100, unit="%") as bar:
        measured = measure_decoders(
            dense,
            reduced,
            load,
            options.plan,
            command=["corp-deploy", *sys.argv[1:]],
            progress=lambda share, _: bar(int(100 * share)),
        )
        bar(100)
    if output is not None:
        save_decoder_bench(measured, output)
    for warning in measured.warnings:
        out.warn(warning)
    caches = cache_table(measured.caches, length=load.cached, batch=max(load.batches))
    out.result(decoder_record(measured), prefill_table(measured), decode_table(measured), caches)
    return measured.is_timed


@command(first="weights text tokens samples batch max-ratio min-agreement max-kl confidence output")
@click.argument("model", metavar="DENSE")
@click.argument("candidates", nargs=-1, type=ANY_PATH)
@click.option("--batch", type=Value(BATCH), default=1, show_default=True, help="Sequences run at once.")
@click.option("--output", "-o", type=FILE, default=None, help="Record to write (.json).")
def perplexity(
    model: ModelChoice,
    candidates: tuple[Path, ...],
    inputs: Annotated[RequiredInputs, some("text", "tokens", "samples", "seed")],
    batch: int,
    options: LanguageOptions,
    output: Path | None,
    out: Output,
) -> int:
    """Measure how well decoders predict a held-out text. CANDIDATES are compared with DENSE, token by token.

    DENSE is hf:DIR or a directory written by corp-deploy, CANDIDATES are such directories and their graphs. No labels
    are needed: models predict the text's next token. The output has the perplexity, its ratio to the dense model's on
    the same sequences, the share of tokens with the same most likely next token, and the KL divergence in nats a token,
    each with its interval over sequences. A limit is met if no part of the interval breaks it, and broken (exit 1) if
    all of it does; in between, and with too few sequences for an interval, it is INCONCLUSIVE (exit 3).

    Example: corp-deploy perplexity hf:opt-1.3b reduced --text held-out.txt --max-ratio 1.05 -o perplexity.json
    """
    from corp_deploy.proof.outcome import EXIT_CODES
    from corp_deploy.proof.perplexity import LanguageLimits, measure_perplexities
    from corp_deploy.proof.prove import candidates_from_paths
    from corp_deploy.views.decoders import perplexity_shown
    from ground.files import write_json
    from perf.parity.perplexity import LEAST_SEQUENCES

    limits, dense = LanguageLimits.from_options(options.values), model.load(out)
    steps = candidates_from_paths(candidates)
    sequences = inputs.open(dense, out.note)
    if limits.some and limits.confidence and sequences.count < LEAST_SEQUENCES:
        out.warn(
            f"{sequences.count} {sequences.noun} have no interval, so that no limit is decided: give {LEAST_SEQUENCES} "
            "or more, or --confidence 0, where the point alone decides"
        )
    with out.progress("reading", sequences.count, unit=sequences.noun) as bar:
        proof = measure_perplexities(dense, steps, sequences, limits, batch=batch, on_progress=bar)
    if proof.fitted is not None and proof.fitted.has_overlap:
        out.warn(proof.fitted.warning)
    record = proof.as_json()
    if output is not None:
        write_json(output, record)
    out.result(record, *perplexity_shown(proof))
    return EXIT_CODES[proof.verdict] if limits.some else 0
