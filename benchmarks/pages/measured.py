"""Which records stand on which page of docs/measured, on docs/support.md and in the README, between marker lines.

python -m benchmarks.pages.measured            writes the pages
python -m benchmarks.pages.measured --check    fails when one is not what the records say
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks import (
    accuracy_page,
    bf16_page,
    convnets_page,
    cost_page,
    decision_page,
    decoder_onnx_page,
    decoder_page,
    engines_page,
    heads_page,
    latency_page,
    openvino_page,
    pixels_page,
    polish_page,
    quantised_page,
    sparsity_page,
)
from benchmarks.coverage.page import coverage
from benchmarks.gpu import page as gpu_page
from benchmarks.real import convnet_page
from benchmarks.real import page as real_page

from .headline import headline

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"
Table = Callable[[dict[str, Any]], str]

PAGES: Mapping[str, Mapping[str, Table]] = {
    "docs/support.md": {"coverage.json": coverage},
    "docs/measured/real-models.md": {
        "real_vit.json": real_page.real_vit,
        "real_vit_engines.json": real_page.real_vit_engines,
        "dense_features.json": real_page.dense_features,
        "real_convnet.json": convnet_page.real_convnet,
    },
    "docs/measured/methods.md": {
        "methods.json": accuracy_page.methods,
        "hard_vit.json": accuracy_page.hard_vit,
        "text_encoder.json": accuracy_page.text_encoder,
        "whole_heads.json": heads_page.whole_heads,
    },
    "docs/measured/convnets.md": {"convnets.json": convnets_page.convnets},
    "docs/measured/budgets-and-polish.md": {
        "budgets.json": accuracy_page.budgets,
        "polish.json": polish_page.polish,
        "layer_polish.json": polish_page.layer_polish,
    },
    "docs/measured/sparsity.md": {
        "sparsity.json": sparsity_page.sparsity,
        "sparse_engines.json": sparsity_page.sparse_engines,
    },
    "docs/measured/engines.md": {
        "engines.json": engines_page.engines,
        "break_fusion.json": engines_page.break_fusion,
    },
    "docs/measured/precision.md": {
        "bf16.json": bf16_page.bf16,
        "quantised.json": quantised_page.quantised,
        "rotation.json": heads_page.rotation,
        "pixels.json": pixels_page.pixels,
    },
    "docs/measured/latency.md": {
        "cpu_latency.json": latency_page.cpu_latency,
        "openvino.json": openvino_page.openvino,
        "history.json": decision_page.history,
    },
    "docs/measured/decoders.md": {
        "trained_decoder.json": decoder_page.trained_decoder,
        "decoder_onnx.json": decoder_onnx_page.decoder_onnx,
        "sequential_decoder.json": decoder_page.sequential_decoder,
    },
    "docs/measured/costs.md": {
        "calibration_small.json": cost_page.calibration,
        "passes.json": cost_page.passes,
        "reduce_base.json": cost_page.reduction,
        "proof_cost.json": cost_page.proof_cost,
        "sweep_trials.json": decision_page.sweep_trials,
    },
}
"""By page, its records in the order in which they stand there."""
ON_GPUS = "docs/measured/gpu.md"


def _record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def tables(of: Mapping[str, Table], results: Path = RESULTS) -> str:
    """Those whose record is there and says something."""
    every = [table(_record(results / name)) for name, table in of.items() if (results / name).is_file()]
    return "\n\n".join(each for each in every if each)


def on_gpus(results: Path = RESULTS) -> list[str]:
    """Goals and tables of the records that were measured on a GPU; nothing where there are none."""
    found = {part: results / f"gpu_{part}.json" for part in gpu_page.PARTS}
    read = {part: _record(path) for part, path in found.items() if path.is_file()}
    records = {part: record for part, record in read.items() if gpu_page.counts(record)}
    made = [
        gpu_page.latency(record, 0.5) if part == "latency" else gpu_page.TABLES[part](record)
        for part, record in records.items()
    ]
    return ["Goals on a GPU:\n\n" + gpu_page.goals(records), *made] if records else []


NO_GPU = (
    "There is no such record yet. `python -m benchmarks.gpu.run --output out` makes them on a machine with a GPU in "
    "nine minutes, resumably; once they are committed, this page has their tables."
)


def of_gpus(results: Path = RESULTS) -> str:
    """The page of what was measured on GPUs, or that nothing was."""
    return "\n\n".join(on_gpus(results)) or NO_GPU


def contents(results: Path = RESULTS) -> dict[str, str]:
    """What stands between the markers of each page."""
    every = {page: tables(of, results) for page, of in PAGES.items()}
    return every | {ON_GPUS: of_gpus(results), "README.md": headline(results)}


def with_records(text: str, content: str) -> str:
    """A page with what stands between its markers made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a page differs.")
def main(check: bool) -> None:
    """Bring the pages up to the records."""
    for name, content in contents().items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        made = with_records(text, content)
        if check and made != text:
            raise click.ClickException(f"{name} differs from the records; run python -m benchmarks.pages.measured")
        if not check:
            path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
