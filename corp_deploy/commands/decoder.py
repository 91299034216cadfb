"""corp-deploy export-decoder, verify-decoder and bench-decoder."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.running import PlanOptions
from corp_deploy.invocation.values import ListOf
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED, EXIT_INCONCLUSIVE
from ground.quantities import ERROR, SEED, THREADS, TOKENS
from ground.quantity import BATCH

from .declared import record_options
from .options import BATCHES, DIRECTORY, FILE, output_options, value_options
from .value import Value

if TYPE_CHECKING:
    from corp_deploy.proof.decoder_speed import DecoderLoad
    from perf.runners.onnx import Provider

provider_option = click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="ONNX Runtime's execution provider; another than asked for is never used in its place. cuda takes fp16 alone.",
)


@click.command("export-decoder")
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Directory for the graph and its settings.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "int8", "int4", "fp16"]),
    default="fp32",
    show_default=True,
    help="int8 and int4 are of weights alone; fp16 is for GPUs, the others for CPUs.",
)
@click.option("--baseline", type=DIRECTORY, default=None, help="The dense model's directory, to compare caches.")
@click.option("--length", type=Value(TOKENS), default=2048, show_default=True, help="Tokens that caches are told for.")
@click.option("--batch", type=Value(BATCH), default=1, show_default=True, help="Sequences that caches are told for.")
@output_options
def export_decoder_command(
    directory: Path, output: Path, precision: str, baseline: Path | None, length: int, batch: int, out: Output
) -> None:
    """Write the ONNX graph with a key/value cache of a plain directory of transformers, by onnxruntime-genai's builder.

    DIRECTORY is a Llama, Mistral, Qwen2 or Qwen3: the dense one, or what reduce --save-as hf has written.

    Example: corp-deploy export-decoder reduced/hf -o reduced/onnx --baseline dense
    """
    from corp_deploy.store.decoder_graph import cache_of_directory, export_decoder, facts_of_graph
    from corp_deploy.views.decoders import bytes_in_words, cache_record, cache_table

    caches = {} if baseline is None else {"dense": cache_of_directory(baseline, precision=precision)}
    with out.progress("building", 1, unit="graph") as done:
        graph = export_decoder(directory, output, precision=precision)
        done(1)
    caches["this model" if baseline is None else "reduced"] = graph.cache
    told = {name: cache_record(cache, length=length, batch=batch) for name, cache in caches.items()}
    record: dict[str, Any] = {**facts_of_graph(graph), "precision": precision, "caches": told}
    said = f"{graph.path}: {precision}, {bytes_in_words(graph.size_bytes)} with its weights"
    out.result(record, said, cache_table(caches, length=length, batch=batch))


@click.command("verify-decoder")
@click.argument("directory", type=DIRECTORY)
@click.argument("graph", type=DIRECTORY)
@click.option("--output", "-o", type=FILE, required=True, help="Record of the differences to write.")
@click.option("--length", type=Value(TOKENS), default=32, show_default=True, help="Tokens of a sequence.")
@click.option("--batch", type=Value(BATCH), default=2, show_default=True, help="Sequences.")
@click.option("--seed", type=Value(SEED), default=0, show_default=True, help="Of the tokens, which are any.")
@click.option(
    "--max-error",
    type=Value(ERROR),
    default=None,
    help="Largest relative error of the logits; default: 1e-4 for fp32 graphs, and others are measured, not judged.",
)
@provider_option
@output_options
def verify_decoder_command(
    directory: Path,
    graph: Path,
    output: Path,
    length: int,
    batch: int,
    seed: int,
    max_error: float | None,
    provider: "Provider",
    out: Output,
) -> None:
    """Hold the logits of GRAPH, written by export-decoder, against transformers on DIRECTORY in FP32.

    All tokens at once, then one after the other with the key/value cache. Exit code 1 where one is too far off.

    Example: corp-deploy verify-decoder reduced/hf reduced/onnx -o reduced/decoder-parity.json
    """
    from corp_deploy.proof.decoder_parity import drawn_ids, save_decoder_parity, verify_decoder
    from corp_deploy.store.decoder_graph import graph_of_directory
    from corp_deploy.views.decoders import parity_table

    opened = graph_of_directory(graph)
    ids = drawn_ids(opened.vocabulary, sequences=batch, length=length, seed=seed)
    with out.progress("comparing", 1, unit="graph") as done:
        parity = verify_decoder(directory, opened, ids, provider=provider, max_error=max_error)
        done(1)
    save_decoder_parity(parity, output)
    out.result(parity.as_json(), parity_table(parity))
    if not parity.passed:
        click.get_current_context().exit(EXIT_FAILED)


def _load(
    length: tuple[int, ...], batch: tuple[int, ...], cached: int, provider: "Provider", threads: int | None
) -> "DecoderLoad":
    from corp_deploy.proof.decoder_speed import DecoderLoad

    return DecoderLoad(lengths=length, batches=batch, cached=cached, provider=provider, threads=threads)


load_options = value_options(
    "load",
    _load,
    click.option(
        "--length",
        type=Value(ListOf(TOKENS, "16,64,256")),
        default="16,64,256",
        show_default=True,
        help="Lengths of prompts to measure, one prompt at a time.",
    ),
    click.option("--batch", type=BATCHES, default="1,4,16", show_default=True, help="Batch sizes to decode."),
    click.option(
        "--cached", type=Value(TOKENS), default=256, show_default=True, help="Tokens in the cache while decoding."
    ),
    provider_option,
    click.option("--threads", type=Value(THREADS), default=None, help="CPU threads; default: the runtime's choice."),
)


@click.command("bench-decoder")
@click.argument("dense", type=DIRECTORY)
@click.argument("reduced", type=DIRECTORY)
@click.option("--output", "-o", type=FILE, required=True, help="Record to write, raw samples and all.")
@load_options
@record_options("asked", PlanOptions)
@output_options
def bench_decoder_command(
    dense: Path, reduced: Path, output: Path, load: "DecoderLoad", asked: PlanOptions, out: Output
) -> None:
    """Time prefill and decoding of DENSE against REDUCED in ONNX Runtime, interleaved, with an A/A run beside them.

    Both are directories of export-decoder, or plain ones of transformers, which are exported to FP32 first. Every
    length and every batch size has the time limit for itself. Exit code 3 where none could be measured in time.

    Example: corp-deploy bench-decoder dense/onnx reduced/onnx -o decoders.json
    """
    from corp_deploy.proof.decoder_speed import measure_decoders
    from corp_deploy.views.decoders import cache_table, decode_table, decoder_record, prefill_table
    from perf.record.decoders import save_decoder_bench

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
    if not measured.is_timed:
        click.get_current_context().exit(EXIT_INCONCLUSIVE)
