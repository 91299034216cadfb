"""Tables of records for the pages of docs/measured and docs/support.md, between marker lines.

python -m benchmarks.pages.measured            writes the pages
python -m benchmarks.pages.measured --check    fails if a page differs from the records
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.coverage.page import classes, coverage, names
from benchmarks.gpu import page as gpu_page
from benchmarks.pages import (
    accuracy_page,
    convnets_page,
    cost_page,
    decoder_page,
    engines_page,
    latency_page,
    levers_page,
    measurement_page,
    merging_page,
    precision_page,
    sparsity_page,
    startup_page,
)
from benchmarks.pages.installed import installed
from benchmarks.pages.markdown import Row, paragraphs
from benchmarks.real import page as real_page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"
Table = Callable[[Row], str]
ON_GPUS, SUPPORT = "docs/measured/gpu.md", "docs/support.md"

PAGES: Mapping[str, Mapping[str, tuple[str, Table]]] = {
    SUPPORT: {
        "coverage.json": ("Encoders and convolutional networks", coverage),
        "levers.json": ("Options by kind of site", levers_page.levers),
        "coverage_names.json": ("Names of timm", names),
        "coverage_classes.json": ("Classes without a family", classes),
    },
    "docs/measured/real-models.md": {
        "real_vit.json": ("DINOv2 on photographs", real_page.real_vit),
        "efforts.json": ("`--effort` on three models", real_page.efforts),
        "more_data.json": ("What more images are worth", real_page.more_data),
        "real_vit_engines.json": ("Speed and engines of DINOv2", real_page.real_vit_engines),
        "real_convnet.json": ("EfficientNet-Lite0 on photographs", real_page.real_convnet),
    },
    "docs/measured/methods.md": {
        "methods.json": ("Two redundant ViTs", accuracy_page.methods),
        "hard_vit.json": ("A ViT without redundancy", accuracy_page.hard_vit),
        "text_encoder.json": ("A text encoder", accuracy_page.text_encoder),
        "positions.json": ("Positions of merged tokens", merging_page.positions),
        "mlp_merging.json": ("Tokens merged for MLPs alone", merging_page.mlp_merging),
    },
    "docs/measured/convnets.md": {"convnets.json": ("Loss by method", convnets_page.convnets)},
    "docs/measured/sparsity.md": {
        "sparsity.json": ("Loss of 2:4 sparsity", sparsity_page.sparsity),
    },
    "docs/measured/engines.md": {
        "engines.json": ("Head geometry", engines_page.engines),
        "break_fusion.json": ("Fusion breaks, and several targets", engines_page.break_fusion),
    },
    "docs/measured/precision.md": {
        "bf16.json": ("FP16 and BF16", precision_page.bf16),
        "quantised.json": ("INT8 and FP8", precision_page.quantised),
    },
    "docs/measured/latency.md": {
        "cpu_latency.json": ("ONNX Runtime", latency_page.cpu_latency),
        "openvino.json": ("OpenVINO", latency_page.openvino),
    },
    "docs/measured/decoders.md": {
        "trained_decoder.json": ("Perplexity", decoder_page.trained_decoder),
        "decoder_onnx.json": ("Prefill and decoding", decoder_page.decoder_onnx),
    },
    "docs/measured/costs.md": {
        "passes.json": ("Each command in forward passes", cost_page.passes),
        "workers.json": ("Calibration by several workers", cost_page.workers),
        "proof_cost.json": ("Cost of `verify`", cost_page.proof_cost),
    },
    "docs/measured/startup.md": {"startup.json": ("Each command", startup_page.startup)},
    "docs/measured/measurement.md": {
        "gate_alarms.json": ("False alarms", measurement_page.gate_alarms),
        "harness_overhead.json": ("Overhead of the timing code", measurement_page.harness_overhead),
    },
}
"""The records of each page in order, each with its heading and the function that makes its table."""


def _record(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def tables(of: Mapping[str, tuple[str, Table]], results: Path = RESULTS) -> str:
    """Return the tables of the records that exist, each under its heading and with its remarks."""
    parts = []
    for name, (heading, table) in of.items():
        if (results / name).is_file():
            record = _record(results / name)
            parts += [f"## {heading}", table(record), *record.get("remarks", [])]
    return paragraphs(*parts)


def on_gpus(results: Path = RESULTS) -> list[str]:
    """Return goals and tables of the records that were measured on a GPU, if there are any."""
    records = gpu_page.gpu_records(results)
    made = [
        gpu_page.latency(record, 0.5) if part == "latency" else gpu_page.TABLES[part](record)
        for part, record in records.items()
    ]
    return ["Goals on a GPU:\n\n" + gpu_page.goals(records), *made] if records else []


NO_GPU = (
    "There is no GPU record yet. On a machine with a GPU, run `python -m benchmarks.gpu.run --output out --only "
    "latency,variants` and the same with `--only engines,real`; each takes nine minutes and can be resumed. Commit the "
    "records to get their tables on this page."
)


def of_gpus(results: Path = RESULTS) -> str:
    """Return the tables of GPU records, or a note that there are none."""
    return paragraphs(*on_gpus(results)) or NO_GPU


def contents() -> dict[str, str]:
    """Return the text between the markers of each page."""
    return {page: tables(of) for page, of in PAGES.items()} | {
        "docs/reference/compatibility.md": installed(),
        ON_GPUS: of_gpus(),
    }


def with_records(text: str, content: str) -> str:
    """Return a page with new text between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a page differs.")
def main(check: bool) -> None:
    """Update the pages from the records."""
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
