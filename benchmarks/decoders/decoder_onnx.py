"""A Llama of 8 layers in ONNX Runtime on the CPU, dense against half of the MLPs' channels and of the heads' groups.

    python -m benchmarks.decoders.decoder_onnx --output benchmarks/results/decoder_onnx.json

Weights are random, since time doesn't depend on their values. Graphs of export-decoder are compared with transformers,
and then timed, dense and reduced interleaved in one process.
"""

import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import Bench, measures
from corp_deploy.invocation.running import DecoderLoad
from corp_deploy.proof.decoder_parity import draw_ids, measure_decoders, verify_decoder
from corp_deploy.store.decoder_graph import DecoderGraph, export_decoder
from corp_deploy.views.decoders import cache_record, decoder_record
from perf.timing.laps import Plan
from tests.decoders import write_decoder

DENSE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
MLP: dict[str, Any] = {"intermediate_size": 704}
GROUPS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
REDUCED = {"half of the channels": MLP, "half of the groups": GROUPS, "both": MLP | GROUPS}


def exported(scratch: Path, name: str, changes: dict[str, Any]) -> tuple[DecoderGraph, dict[str, Any]]:
    """Export a Llama with random weights, and return the graph with its sizes and its errors against transformers."""
    home = scratch / name
    model = write_decoder(home / "model", "llama", **DENSE | changes)
    graph = export_decoder(home / "model", home / "graph")
    ids = draw_ids(graph.vocabulary, sequences=2, length=32, seed=0)
    parity = verify_decoder(home / "model", graph, ids)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "size_bytes": graph.size_bytes,
        "relative_error": {link.name: link.measures["relative_error"] for link in parity.links},
        "passed": parity.passed,
    }
    return graph, facts


def row_of(
    scratch: Path, dense: Callable[[], tuple[DecoderGraph, dict[str, Any]]], name: str, load: DecoderLoad, plan: Plan
) -> dict[str, Any]:
    """Compare one reduction with the dense model."""
    (whole, of_dense), before = dense(), os.getloadavg()[0]
    graph, facts = exported(scratch, name, REDUCED[name])
    measured = measure_decoders(whole.path.parent, graph.path.parent, load, plan)
    caches = {
        which: cache_record(each.cache, length=2048, batch=1) for which, each in (("dense", whole), ("reduced", graph))
    }
    return {"dense": of_dense, "reduced": facts, "caches": caches, "load_before": before, **decoder_record(measured)}


@measures("benchmarks/decoder-onnx")
@click.option("--time-limit", type=float, default=15.0, show_default=True, help="Seconds per row, at most.")
@click.option("--threads", type=int, default=2, show_default=True)
def main(bench: Bench, time_limit: float, threads: int) -> None:
    """Measure and write the record."""
    torch.set_num_threads(threads)
    bench.share(threads=threads, model=DENSE)
    load = DecoderLoad(threads=threads)
    plan = Plan(time_limit_s=time_limit, min_rounds=8, half_width_rel=0.02, warm_up_limit_s=2.0)
    with tempfile.TemporaryDirectory() as scratch:
        dense = cache(partial(exported, Path(scratch), "dense", {}))
        for name in REDUCED:
            bench.row({"name": name}, row_of, Path(scratch), dense, name, load, plan)


if __name__ == "__main__":
    main()
