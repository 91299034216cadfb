"""A Llama of 8 layers in ONNX Runtime on the CPU, dense against half of its MLPs' channels and half of its groups.

    python -m benchmarks.decoders.decoder_onnx --output benchmarks/results/decoder_onnx.json

Weights are random: the time doesn't depend on their values. Graphs are those of export-decoder; each is held against
transformers before it is timed, dense and reduced interleaved in one process.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from corp_deploy.invocation.running import DecoderLoad
from corp_deploy.machine import versions
from corp_deploy.proof.decoder_parity import drawn_ids, measure_decoders, verify_decoder
from corp_deploy.store.decoder_graph import DecoderGraph, export_decoder
from corp_deploy.views.decoders import cache_record, decoder_record
from ground.files import write_json
from perf.timing.laps import Plan
from perf.timing.watch import cpu_name
from tests.decoders import write_decoder

KIND = "benchmarks/decoder-onnx"
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


def exported(scratch: Path, name: str, changes: dict[str, Any], length: int) -> tuple[DecoderGraph, dict[str, Any]]:
    """The graph of such a Llama with random weights, and how far its logits are from transformers'."""
    home = scratch / name
    model = write_decoder(home / "model", "llama", **DENSE | changes)
    graph = export_decoder(home / "model", home / "graph")
    ids = drawn_ids(graph.vocabulary, sequences=2, length=length, seed=0)
    parity = verify_decoder(home / "model", graph, ids)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "size_bytes": graph.size_bytes,
        "relative_error": {link.name: link.measures["relative_error"] for link in parity.links},
        "passed": parity.passed,
    }
    return graph, facts


def compared(scratch: Path, load: DecoderLoad, plan: Plan, length: int) -> list[dict[str, Any]]:
    """One entry a reduction."""
    dense, of_dense = exported(scratch, "dense", {}, length)
    rows = []
    for name, changes in REDUCED.items():
        before = os.getloadavg()[0]
        graph, facts = exported(scratch, name, changes, length)
        measured = measure_decoders(dense.path.parent, graph.path.parent, load, plan)
        caches = {
            which: cache_record(each.cache, length=2048, batch=1)
            for which, each in (("dense", dense), ("reduced", graph))
        }
        told = decoder_record(measured)
        rows.append(
            {"name": name, "dense": of_dense, "reduced": facts, "caches": caches, "load_before": before, **told}
        )
        for row in (*told["prefill"], *told["decode"]):
            click.echo(f"{name}: {row.get('length', row.get('batch'))}: speed-up {row['speedup']}")
    return rows


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--time-limit", type=float, default=15.0, show_default=True, help="Seconds per row, at most.")
@click.option("--threads", type=int, default=2, show_default=True)
def main(output: Path, time_limit: float, threads: int) -> None:
    """Measure and write the record."""
    torch.set_num_threads(threads)
    load = DecoderLoad(threads=threads)
    plan = Plan(time_limit_s=time_limit, min_rounds=8, half_width_rel=0.02, warm_up_limit_s=2.0)
    with tempfile.TemporaryDirectory() as scratch:
        rows = compared(Path(scratch), load, plan, length=32)
    write_json(
        output,
        {
            "kind": KIND,
            "version": 1,
            "versions": versions(),
            "cpu": cpu_name(),
            "threads": threads,
            "model": DENSE,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
