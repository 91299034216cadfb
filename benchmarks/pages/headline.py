"""The few figures that the README and the first page of docs/measured show, each with the page that has the others."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu.goals import GEOMETRIES, done
from benchmarks.gpu.page import gpu_records
from benchmarks.pages.markdown import table

Row = tuple[str, str, str]
NO_GPU = "None of it was measured on a GPU: TensorRT-RTX builds real engines without one."


def _rows(results: Path, name: str, **where: Any) -> list[dict[str, Any]]:
    record = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    found = [row for row in record["rows"] if all(row[key] == value for key, value in where.items())]
    assert found, (name, where)
    return found


def _real_encoder(results: Path, folder: str) -> Row:
    ways = {"none": "removed without repair", "corp": "preset corp", "best": "best"}
    ways |= {"best, by site": "best by site", "merging, growing": "merged tokens instead"}
    errors = {
        words: _rows(results, "real_vit", method=method, share=0.8)[0]["class_error"] for method, words in ways.items()
    }
    said = ", ".join(f"{error:.3f} ({words})" for words, error in errors.items())
    return (
        f"[DINOv2 ViT-S on photographs]({folder}real-models.md)",
        "error of the class token at 80 % of the MACs",
        said,
    )


def _hard(results: Path, folder: str) -> Row:
    change = {
        method: fmean(row["points"][0] for row in _rows(results, "hard_vit", method=method, sparsity=0.5))
        for method in ("corp", "best", "best, by site")
    }
    said = ", ".join(f"{points:+.1f} ({method})" for method, points in change.items())
    what = "points of accuracy at the MACs of half of everything"
    return f"[a ViT trained to be hard to prune]({folder}methods.md)", what, said


def _on_cpu(results: Path, folder: str) -> Row:
    rows = [
        (row["model"], row["heads"], row["macs_share"], batch)
        for row in _rows(results, "cpu_latency", heads="square")
        for batch in row["rows"]
        if batch["batch"] == 8 or (row["model"] == "DeiT-B" and batch["batch"] == 4)
    ]
    said = ", ".join(
        f"{model} {row['speedup'][0]:.2f} times at {share:.0%} of the MACs (batch {row['batch']})"
        for model, _, share, row in rows
    )
    return f"[ONNX Runtime, two CPU cores]({folder}latency.md)", "speed-up over dense", said


def _fused(results: Path, folder: str) -> Row:
    kept = {row["variant"]: row for row in _rows(results, "engines", model="DeiT-S")}
    said = ", ".join(f"{name} {row['fused_attention']} of {row['blocks']}" for name, row in kept.items())
    return f"[TensorRT-RTX, FP16]({folder}engines.md)", "fused attention kernels of DeiT-S", said


def _on_gpu(results: Path, folder: str) -> list[Row]:
    """What the goals of the GPU benchmark ask of the largest model, where there is a record of a GPU."""
    found = gpu_records(results)
    latency = found.get("latency", {"rows": []})["rows"]
    speedups = {
        geometry: row["subjects"][geometry]["speedup"][0]
        for row in done(latency, row="latency", model="DeiT-H", mode="graph", sparsity=0.5, batch=16)
        for geometry in GEOMETRIES
        if geometry in row["subjects"]
    }
    rows = []
    if speedups:
        said = ", ".join(f"{speedup:.2f} times ({geometry})" for geometry, speedup in speedups.items())
        where = found["latency"]["environment"]["gpu"]
        what = "throughput over dense of DeiT-H, half of everything, batch 16"
        rows.append((f"[{where}, torch FP16]({folder}gpu.md)", what, said))
    return rows


def headline(results: Path, folder: str) -> str:
    """The table, its links to pages in this folder as they are written where it stands, and what no GPU has shown."""
    every = (_real_encoder, _hard, _on_cpu, _fused)
    on_gpu = _on_gpu(results, folder)
    rows: Iterable[Row] = (*(row(results, folder) for row in every), *on_gpu)
    text = table(("where", "what", "figures"), rows)
    return text if on_gpu else f"{text}\n\n{NO_GPU}"
