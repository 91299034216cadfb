"""The records of a GPU run as Markdown tables and one page. Reads the records alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu.goals import GEOMETRIES, done, judged
from benchmarks.gpu.page_variants import real, variants
from benchmarks.gpu.tables import machine, ratio
from benchmarks.pages.markdown import table

Record = Mapping[str, Any]
LOOPS = {"open": "open loop", "closed": "closed loop", "polished": "closed loop, polished"}
Row = Mapping[str, Any]
PARTS = ("calibration", "latency", "variants", "engines", "accuracy", "real")


def calibration(record: Record) -> str:
    """Calibrations, then reductions."""
    rows = []
    for row in done(record["rows"], row="calibration"):
        memory = row["peak_memory_bytes"]
        peaks = ", ".join(f"{name} {rate:.0f}" for name, rate in row["product_tflops"].items())
        rows.append(
            [
                row["model"],
                row["forward"],
                f"{row['seconds']:.1f}",
                f"{row['ratio_to_bare']:.2f}",
                f"{row['share_of_peak']:.0%}",
                peaks,
                "-" if memory is None else f"{memory / 1e9:.1f}",
                str(row["paper_seconds_rtx3090"] or "-"),
            ]
        )
    head = ["model", "forward", "s", "of bare forward", "of peak", "peak TFLOP/s", "memory GB", "paper s, RTX 3090"]
    images = ", ".join(sorted({f"{row['images']:,}" for row in done(record["rows"], row="calibration")})) or "no"
    text = f"Calibration on {images} images {machine(record)}. The paper's seconds are of other hardware and code, "
    text += "calibration and recovery together:\n\n" + table(head, rows)
    reductions = [
        [
            row["model"],
            row["where"],
            f"{row['seconds']:.1f}" + (" (extrapolated)" if row["extrapolated"] else ""),
            f"{row['blocks_timed']} of {row['blocks']}",
        ]
        for row in done(record["rows"], row="reduction")
    ]
    if reductions:
        text += "\n\nReduction at 50 %, preset best:\n\n" + table(["model", "on", "s", "blocks timed"], reductions)
    return text


def latency(record: Record, sparsity: float | None = None) -> str:
    """Speed-ups by geometry (of CUDA graphs at one sparsity, or of every row), then which attention kernel ran."""
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
        rows.append([*head, *told, *cells, ratio(subjects["dense again"]["speedup"])])
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
        text += "\n\nMemory of the weights and, at its most, of what one call takes beside them, MB:\n\n"
        text += table(["model", "batch", "dense", *GEOMETRIES], memory)
    return text


def _memory(found: Row | None) -> str:
    return "-" if found is None else f"{found['weights_bytes'] / 1e6:.0f} + {found['call_bytes'] / 1e6:.0f}"


def _speed(subject: Row | None, refused: str | None) -> str:
    if subject is None:
        return "refused" if refused else "-"
    share = subject["realised_share"]
    return ratio(subject["speedup"]) + ("" if share is None else f", {share:.0%}")


def _kernel(found: Row) -> str:
    return f"{found['kind']} ({found['qk']}/{found['v']})"


def engines(record: Record) -> str:
    """The answer about TensorRT-RTX, what full TensorRT built, how fast it ran, the chain of parity."""
    lines = [f"Engines, FP16, {machine(record)}:", ""]
    for row in done(record["rows"], row="rtx"):
        answer = {True: "loads and runs", False: "does not load", None: "was not tried"}[row["loads"]]
        why = row.get("reason_not_loaded") or f"relative error {row.get('relative_error', 0.0):.1e}"
        lines.append(f"* A portable plan of TensorRT-RTX {row['version']} {answer} here: {why}")
    for row in done(record["rows"], row="tensorrt"):
        answer = f"relative error {row['relative_error']:.1e}" if row["loads"] else row["reason_not_loaded"]
        lines.append(
            f"* TensorRT {row['version']}, {row['model']} {row['variant']}: {row['fused_attention']} of "
            f"{row['attention_sites']} attentions fused, {row['kernels']} kernels, "
            f"{row['plan_bytes'] / 1e6:.1f} MB; {answer}"
        )
    for row in done(record["rows"], row="speed"):
        told = ", ".join(f"batch {each['batch']} {ratio(each['speedup'])}" for each in row["rows"])
        lines.append(f"* {row['backend']}, {row['model']} {row['variant']}: speed-up {told}")
    for row in done(record["rows"], row="parity"):
        told = ", ".join(f"{each['name']} {each['relative_error']:.1e} {each['status']}" for each in row["links"])
        lines.append(f"* Parity, {row['model']}: {told}; structure: {len(row['structure'])} failed")
    return "\n".join(lines if len(lines) > 2 else [f"No engine was measured {machine(record)}."])


def accuracy(record: Record) -> str:
    """The trained model, presets by sparsity, the curve over calibration images."""
    rows = done(record["rows"], row="reduction")
    lines = [f"Reductions of a ViT trained on procedural images {machine(record)}."]
    for row in done(record["rows"], row="training"):
        low, high = row["accuracy_interval"]
        lines.append(
            f"The dense model saw {row['images']:,} images in {row['seconds']:.0f} s; accuracy {row['accuracy']:.1%} "
            f"({low:.1%} to {high:.1%}) on {row['held_out_images']} held-out images."
        )
    sparsities = sorted({row["sparsity"] for row in rows})
    groups: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["preset"], row["loop"], row["kind"], row["images"]), []).append(row)
    widest = max((len({row["sparsity"] for row in group}) for group in groups.values()), default=0)
    swept = {
        key: group
        for key, group in groups.items()
        if key[1] != "open" or len({row["sparsity"] for row in group}) == widest
    }
    cells = [
        [preset, LOOPS[loop], kind, str(images), *(_effect(group, each) for each in sparsities)]
        for (preset, loop, kind, images), group in swept.items()
    ]
    lines += ["Relative logit error, accuracy and agreement with the dense model, mean of the calibration seeds:", ""]
    lines.append(table(["preset", "loop", "kind", "images", *(f"{each:.0%}" for each in sparsities)], cells))
    curve = sorted(
        (row for row in rows if row["preset"] == "best" and row["loop"] == "open" and row["seed"] == 0),
        key=lambda row: (row["sparsity"], row["images"]),
    )
    if curve:
        shown = [
            [str(row["images"]), f"{row['sparsity']:.0%}", f"{row['relative_error']:.4f}", f"{row['accuracy']:.1%}"]
            for row in curve
        ]
        lines += ["", "Preset best by calibration images, seed 0:", ""]
        lines.append(table(["images", "sparsity", "relative error", "accuracy"], shown))
    places = sorted({f"{LOOPS[row['loop']]} on {row['reduced_on']}" for row in rows})
    reasons = sorted({row["not_on_gpu"] for row in rows if row.get("not_on_gpu")})
    lines += ["", f"Reduced: {', '.join(places) or '-'}." + "".join(f" Not on the GPU: {each}" for each in reasons)]
    return "\n".join(lines)


def _effect(rows: Sequence[Row], sparsity: float) -> str:
    here = [row for row in rows if row["sparsity"] == sparsity]
    if not here:
        return "-"
    error, right, same = (mean(row[key] for row in here) for key in ("relative_error", "accuracy", "agreement"))
    return f"{error:.4f}, {right:.1%}, {same:.1%}"


TABLES: dict[str, Callable[[Record], str]] = {
    "calibration": calibration,
    "latency": latency,
    "variants": variants,
    "engines": engines,
    "accuracy": accuracy,
    "real": real,
}


def unmeasured(record: Record) -> list[str]:
    """Rows that ended otherwise than done, and what was skipped."""
    lines = [f"* {row['key']}: {row['status']} ({row['reason']})" for row in record["rows"] if row["status"] != "done"]
    return lines + [f"* {each['key']}: skipped ({each['reason']})" for each in record["skipped"]]


def counts(record: Record) -> bool:
    """Whether the record says something about a GPU: tiny models and CPUs show that the scripts run, no more."""
    return record["environment"]["gpu"] is not None and not record["settings"]["small"]


def gpu_records(results: Path) -> dict[str, Record]:
    """Those of a GPU in this folder, by part."""
    paths = {part: results / f"gpu_{part}.json" for part in PARTS}
    found = {part: json.loads(path.read_text(encoding="utf-8")) for part, path in paths.items() if path.is_file()}
    return {part: record for part, record in found.items() if counts(record)}


def goals(records: Mapping[str, Record]) -> str:
    """Every goal with its verdict."""
    rows = {part: each["rows"] if counts(each) else [] for part, each in records.items()}
    found = judged(rows.get("calibration", []), rows.get("latency", []))
    cells = [[goal.wanted, goal.found, goal.verdict] for goal in found]
    return table(["goal", "found (95 % interval)", "verdict"], cells)


def page(records: Mapping[str, Record]) -> str:
    """Goals first, then every part's tables and what it did not measure."""
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
