"""Markdown tables and a page of the records of a GPU run."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.gpu.goals import GEOMETRIES, done, judged
from benchmarks.gpu.page_variants import real, variants
from benchmarks.gpu.tables import machine
from benchmarks.pages.markdown import Column, Row, interval, interval_of, paragraphs, table, table_of

Record = Row
ALL = ("dense", *GEOMETRIES)
PARTS = ("latency", "variants", "engines", "real")


def latency(record: Record, sparsity: float | None = None) -> str:
    """Return the tables of speed-ups, attention kernels and memory by head geometry.

    With a sparsity, the table of speed-ups has only CUDA graphs at this sparsity.
    """
    chosen = {} if sparsity is None else {"sparsity": sparsity, "mode": "graph"}
    measured = done(record["rows"], row="latency", **chosen)
    measured.sort(key=lambda row: (row["model"], row["mode"], row["sparsity"], row["batch"]))
    speeds: dict[str, Column] = {
        "model": "{model}",
        "called by": "{mode}",
        "sparsity": "{sparsity:.0%}",
        "batch": "{batch}",
        "dense p50 ms": "{subjects[dense][p50_ms][0]:.3f}",
        "images/s": "{subjects[dense][images_per_s_compute]:.0f}",
        **{geometry: partial(_speed, geometry) for geometry in GEOMETRIES},
        "A/A noise": lambda row: interval(row["subjects"]["dense again"]["speedup"]),
    }
    parts = [
        f"torch {record['settings']['precision']}, dense against reduced {machine(record)}: speed-up with its 95 % "
        "interval and the share of the MAC reduction realised, by head geometry:",
        table_of(measured, speeds),
    ]
    own: dict[str, Column] = {"model": "{model}", "batch": "{batch}"}
    if kernels := done(record["rows"], row="attention"):
        shown = {name: f"{{kernels[{name}][kind]}} ({{kernels[{name}][qk]}}/{{kernels[{name}][v]}})" for name in ALL}
        parts += ["Attention kernel that ran (widths of q/k and v):", table_of(kernels, own | shown)]
    if memory := [row for row in measured if any(row.get("memory", {}).values())]:
        parts.append("Memory of the weights, and peak memory of one call in addition, in MB:")
        parts.append(table_of(memory, own | {name: partial(_memory, name) for name in ALL}))
    return paragraphs(*parts)


def _memory(name: str, row: Row) -> str:
    found = row["memory"].get(name)
    return "-" if found is None else f"{found['weights_bytes'] / 1e6:.0f} + {found['call_bytes'] / 1e6:.0f}"


def _speed(geometry: str, row: Row) -> str:
    if (subject := row["subjects"].get(geometry)) is None:
        return "refused" if geometry in row["refused"] else "-"
    share = subject["realised_share"]
    return interval(subject["speedup"]) + ("" if share is None else f", {share:.0%}")


def engines(record: Record) -> str:
    """Return the table of engines against the dense engine, with the fused attention of each build."""
    rows = [{"built": row, **each} for row in done(record["rows"], row="engine") for each in row["rows"]]
    columns: dict[str, Column] = {
        "model": "{built[model]}",
        "variant": "{built[variant]}",
        "of the MACs": lambda row: f"{row['built']['macs'] / row['built']['dense']['macs']:.0%}",
        "fused when dense": "{built[dense][fused_attention]} of {built[dense][attention_sites]}",
        "fused": "{built[fused_attention]} of {built[attention_sites]}",
        "batch": "{batch}",
        "dense p50 ms": interval_of("p50_ms.dense", 3),
        "p50 ms": interval_of("p50_ms.reduced", 3),
        "speed-up": interval_of("speedup"),
    }
    text = f"TensorRT-RTX engines in FP16, built on another machine and copied, {machine(record)}:"
    return paragraphs(text, table_of(rows, columns))


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
    cells = [[goal.wanted, goal.found, goal.verdict] for goal in judged(rows.get("latency", []))]
    return table(["goal", "found (95 % interval)", "verdict"], cells)


def page(records: Mapping[str, Record]) -> str:
    """Return a page with the goals, then the tables and the failed rows of each part."""
    written = "Written by `python -m benchmarks.gpu.run`; the records stand beside it."
    parts = ["# Measurements on a GPU", written, "## Goals", goals(records)]
    for part in PARTS:
        parts.append(f"## {part.capitalize()}")
        if part not in records:
            parts.append("Not run.")
            continue
        left = "\n".join(unmeasured(records[part]))
        parts += [TABLES[part](records[part]), left and "Not measured:", left]
    return paragraphs(*parts) + "\n"
