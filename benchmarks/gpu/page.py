"""Markdown tables and a page of the records of a GPU run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import GEOMETRIES, done, judged
from benchmarks.gpu.page_variants import real, variants
from benchmarks.gpu.tables import machine
from benchmarks.pages.markdown import interval, table

Record = Mapping[str, Any]
Row = Mapping[str, Any]
PARTS = ("latency", "variants", "engines", "real")


def latency(record: Record, sparsity: float | None = None) -> str:
    """Return the tables of speed-ups, attention kernels and memory by head geometry.

    With a sparsity, the table of speed-ups has only CUDA graphs at this sparsity.
    """
    chosen = {} if sparsity is None else {"sparsity": sparsity, "mode": "graph"}
    measured = done(record["rows"], row="latency", **chosen)
    measured.sort(key=lambda row: (row["model"], row["mode"], row["sparsity"], row["batch"]))
    rows = []
    for row in measured:
        subjects = row["subjects"]
        cells = [_speed(subjects.get(geometry), row["refused"].get(geometry)) for geometry in GEOMETRIES]
        dense = subjects["dense"]
        head = [row["model"], row["mode"], f"{row['sparsity']:.0%}", str(row["batch"])]
        told = [f"{dense['p50_ms'][0]:.3f}", f"{dense['images_per_s_compute']:.0f}"]
        rows.append([*head, *told, *cells, interval(subjects["dense again"]["speedup"])])
    head = ["model", "called by", "sparsity", "batch", "dense p50 ms", "images/s", *GEOMETRIES, "A/A noise"]
    precision = record["settings"]["precision"]
    text = (
        f"torch {precision}, dense against reduced {machine(record)}: speed-up with its 95 % interval and the share of "
    )
    text += "the MAC reduction realised, by head geometry:\n\n" + table(head, rows)
    kernels = [
        [row["model"], str(row["batch"]), *(_kernel(row["kernels"][name]) for name in ("dense", *GEOMETRIES))]
        for row in done(record["rows"], row="attention")
    ]
    if kernels:
        text += "\n\nAttention kernel that ran (widths of q/k and v):\n\n"
        text += table(["model", "batch", "dense", *GEOMETRIES], kernels)
    memory = [
        [row["model"], str(row["batch"]), *(_memory(row["memory"].get(name)) for name in ("dense", *GEOMETRIES))]
        for row in measured
        if any(row.get("memory", {}).values())
    ]
    if memory:
        text += "\n\nMemory of the weights, and peak memory of one call in addition, in MB:\n\n"
        text += table(["model", "batch", "dense", *GEOMETRIES], memory)
    return text


def _memory(found: Row | None) -> str:
    return "-" if found is None else f"{found['weights_bytes'] / 1e6:.0f} + {found['call_bytes'] / 1e6:.0f}"


def _speed(subject: Row | None, refused: str | None) -> str:
    if subject is None:
        return "refused" if refused else "-"
    share = subject["realised_share"]
    return interval(subject["speedup"]) + ("" if share is None else f", {share:.0%}")


def _kernel(found: Row) -> str:
    return f"{found['kind']} ({found['qk']}/{found['v']})"


def engines(record: Record) -> str:
    """Return the table of engines against the dense engine, with the fused attention of each build."""
    rows = []
    for row in done(record["rows"], row="engine"):
        for each in row["rows"]:
            p50 = [interval(each["p50_ms"][side], 3) for side in ("dense", "reduced")]
            fused = [f"{own['fused_attention']} of {own['attention_sites']}" for own in (row["dense"], row)]
            head = [row["model"], row["variant"], f"{row['macs'] / row['dense']['macs']:.0%}", *fused]
            rows.append([*head, str(each["batch"]), *p50, interval(each["speedup"])])
    names = [
        "model",
        "variant",
        "of the MACs",
        "fused when dense",
        "fused",
        "batch",
        "dense p50 ms",
        "p50 ms",
        "speed-up",
    ]
    text = f"TensorRT-RTX engines in FP16, built on another machine and copied, {machine(record)}:"
    return f"{text}\n\n{table(names, rows)}"


TABLES: dict[str, Callable[[Record], str]] = {
    "latency": latency,
    "variants": variants,
    "engines": engines,
    "real": real,
}


def unmeasured(record: Record) -> list[str]:
    """Return the rows that failed or were skipped, with the reasons."""
    lines = [f"* {row['key']}: {row['status']} ({row['reason']})" for row in record["rows"] if row["status"] != "done"]
    return lines + [f"* {each['key']}: skipped ({each['reason']})" for each in record["skipped"]]


def counts(record: Record) -> bool:
    """Return whether the record is of a GPU and of models in full size."""
    return record["environment"]["gpu"] is not None and not record["settings"]["small"]


def gpu_records(results: Path) -> dict[str, Record]:
    """Return the GPU records of a folder, by part."""
    paths = {part: results / f"gpu_{part}.json" for part in PARTS}
    found = {part: json.loads(path.read_text(encoding="utf-8")) for part, path in paths.items() if path.is_file()}
    return {part: record for part, record in found.items() if counts(record)}


def goals(records: Mapping[str, Record]) -> str:
    """Return the table of goals with their verdicts."""
    rows = {part: each["rows"] if counts(each) else [] for part, each in records.items()}
    found = judged(rows.get("latency", []))
    cells = [[goal.wanted, goal.found, goal.verdict] for goal in found]
    return table(["goal", "found (95 % interval)", "verdict"], cells)


def page(records: Mapping[str, Record]) -> str:
    """Return a page with the goals, then the tables and the failed rows of each part."""
    lines = ["# Measurements on a GPU", "", "Written by `python -m benchmarks.gpu.run`; the records stand beside it."]
    lines += ["", "## Goals", "", goals(records)]
    for part in PARTS:
        if part not in records:
            lines += ["", f"## {part.capitalize()}", "", "Not run."]
            continue
        lines += ["", f"## {part.capitalize()}", "", TABLES[part](records[part])]
        left = unmeasured(records[part])
        if left:
            lines += ["", "Not measured:", "", *left]
    return "\n".join(lines) + "\n"
