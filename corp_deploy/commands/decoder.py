"""corp-deploy export-decoder, and what verify and bench do with what it writes."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from corp_deploy.invocation.decoding import DecoderExport, DecoderLoad
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED
from ground.files import write_json

from .command import command
from .options import DIRECTORY
from .proof_input_choice import ProofInputChoice
from .verify_run import VerifyRun


@command("export-decoder")
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for the graph and its settings.")
def export_decoder_command(directory: Path, output: Path, options: DecoderExport, out: Output) -> None:
    """Write a decoder's ONNX graph with a key/value cache. The builder of onnxruntime-genai makes it.

    DIRECTORY is a plain one of transformers of a Llama, Mistral, Qwen2 or Qwen3: the dense one, or what reduce
    --save-as hf has written.

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
    """Hold a graph's logits against transformers on the directory in FP32, by any tokens; the exit code."""
    from corp_deploy.proof.decoder_parity import drawn_ids, verify_decoder
    from corp_deploy.store.decoder_graph import graph_of_directory
    from corp_deploy.views.decoders import parity_table

    if inputs.random is None:
        raise click.UsageError("a decoder's graph is asked about any tokens; say of how many sequences: --random 2")
    opened = graph_of_directory(graph)
    ids = drawn_ids(opened.vocabulary, sequences=inputs.random, length=options.length, seed=inputs.seed)
    with out.progress("comparing", 1, unit="graph") as bar:
        parity = verify_decoder(directory, opened, ids, provider=options.provider, max_error=options.max_error)
        bar(1)
    write_json(output, parity.as_json())
    out.result(parity.as_json(), parity_table(parity))
    return 0 if parity.passed else EXIT_FAILED


def bench_graphs(
    dense: Path, reduced: Path, output: Path, options: BenchOptions, of_decoders: DecoderLoad, out: Output
) -> bool:
    """Time prefill and decoding of both; whether there was time for any of it."""
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
    save_decoder_bench(measured, output)
    for warning in measured.warnings:
        out.warn(warning)
    caches = cache_table(measured.caches, length=load.cached, batch=max(load.batches))
    out.result(decoder_record(measured), prefill_table(measured), decode_table(measured), caches)
    return measured.is_timed
