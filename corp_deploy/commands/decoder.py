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

from .declared import record_options
from .options import DIRECTORY, output_options
from .proof_input_choice import ProofInputChoice
from .verify_run import VerifyRun


@click.command("export-decoder")
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for the graph and its settings.")
@record_options("asked", DecoderExport)
@output_options
def export_decoder_command(directory: Path, output: Path, asked: DecoderExport, out: Output) -> None:
    """Write a decoder's ONNX graph with a key/value cache. The builder of onnxruntime-genai makes it.

    DIRECTORY is a plain one of transformers of a Llama, Mistral, Qwen2 or Qwen3: the dense one, or what reduce
    --save-as hf has written.

    Example: corp-deploy export-decoder reduced/hf -o reduced/onnx --baseline dense
    """
    from corp_deploy.store.decoder_graph import cache_of_directory, export_decoder, facts_of_graph
    from corp_deploy.views.decoders import bytes_in_words, cache_record, cache_table

    caches = {} if asked.baseline is None else {"dense": cache_of_directory(asked.baseline, precision=asked.precision)}
    with out.progress("building", 1, unit="graph") as done:
        graph = export_decoder(directory, output, precision=asked.precision)
        done(1)
    caches["this model" if asked.baseline is None else "reduced"] = graph.cache
    told = {name: cache_record(cache, length=asked.length, batch=asked.batch) for name, cache in caches.items()}
    record: dict[str, Any] = {**facts_of_graph(graph), "precision": asked.precision, "caches": told}
    said = f"{graph.path}: {asked.precision}, {bytes_in_words(graph.size_bytes)} with its weights"
    out.result(record, said, cache_table(caches, length=asked.length, batch=asked.batch))


def verify_graph(
    directory: Path, graph: Path, output: Path, asked: VerifyRun, inputs: ProofInputChoice, out: Output
) -> int:
    """Hold a graph's logits against transformers on the directory in FP32, by any tokens; the exit code."""
    from corp_deploy.proof.decoder_parity import drawn_ids, save_decoder_parity, verify_decoder
    from corp_deploy.store.decoder_graph import graph_of_directory
    from corp_deploy.views.decoders import parity_table

    if inputs.random is None:
        raise click.UsageError("a decoder's graph is asked about any tokens; say of how many sequences: --random 2")
    opened = graph_of_directory(graph)
    ids = drawn_ids(opened.vocabulary, sequences=inputs.random, length=asked.length, seed=inputs.seed)
    with out.progress("comparing", 1, unit="graph") as done:
        parity = verify_decoder(directory, opened, ids, provider=asked.provider, max_error=asked.max_error)
        done(1)
    save_decoder_parity(parity, output)
    out.result(parity.as_json(), parity_table(parity))
    return 0 if parity.passed else EXIT_FAILED


def bench_graphs(
    dense: Path, reduced: Path, output: Path, asked: BenchOptions, of_decoders: DecoderLoad, out: Output
) -> bool:
    """Time prefill and decoding of both; whether there was time for any of it."""
    from corp_deploy.proof.decoder_speed import measure_decoders
    from corp_deploy.views.decoders import cache_table, decode_table, decoder_record, prefill_table
    from perf.record.decoders import save_decoder_bench

    provider: Literal["cpu", "cuda"] = "cuda" if asked.provider == "cuda" else "cpu"
    load = replace(of_decoders, batches=asked.batches, provider=provider, threads=asked.threads)
    with out.progress("measuring", 100, unit="%") as done:
        measured = measure_decoders(
            dense,
            reduced,
            load,
            asked.plan,
            command=["corp-deploy", *sys.argv[1:]],
            progress=lambda share, _: done(int(100 * share)),
        )
        done(100)
    save_decoder_bench(measured, output)
    for warning in measured.warnings:
        out.warn(warning)
    caches = cache_table(measured.caches, length=load.cached, batch=max(load.batches))
    out.result(decoder_record(measured), prefill_table(measured), decode_table(measured), caches)
    return measured.is_timed
