"""The tables of INT8 and FP8."""

from collections.abc import Sequence
from typing import Any

from benchmarks.pages.markdown import table

WAYS = ("plain", "balanced", "mse", "entropy", "auto")


def quantised(record: dict[str, Any]) -> str:
    """Return the tables of the record: errors, engines and speed on a CPU."""
    parts = {"quality": _quality, "plans": _plans, "cpu": _cpu}
    return "\n\n".join(made(record[name]) for name, made in parts.items() if name in record)


def _quality(rows: Sequence[dict[str, Any]]) -> str:
    text = (
        "Relative error of the outputs of each INT8 and FP8 graph against the FP32 graph on held-out images (and "
        "accuracy); all other operations are in FP32. `plain` ends each range at the largest value, `balanced` first "
        "moves outliers of norms into the next layer's weights, `mse` and `entropy` also clip the ranges, and `auto`, "
        "the default, uses the rule with the smallest error on the images that the ranges come from:"
    )
    at = {(row["model"], row["precision"], row["way"]): row for row in rows}
    models = dict.fromkeys(row["model"] for row in rows)
    lines = [
        [model, precision.upper(), *(_cell(at.get((model, precision, way))) for way in WAYS)]
        for model in models
        for precision in ("int8", "fp8")
    ]
    beside = ", ".join(
        f"{model} {_cell(at[model, 'fp16', ''])}, {at[model, 'fp32', '']['accuracy']:.1%} in FP32"
        if "accuracy" in at[model, "fp32", ""]
        else f"{model} {_cell(at[model, 'fp16', ''])}"
        for model in models
    )
    return f"{text}\n\n{table(['model', 'format', *WAYS], lines)}\n\nFP16 for comparison: {beside}."


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    accuracy = f" ({row['accuracy']:.1%})" if "accuracy" in row else ""
    return f"{row['error']:.4f}{accuracy}"


def _plans(rows: Sequence[dict[str, Any]]) -> str:
    text = (
        "TensorRT-RTX's plans of DeiT-S (random weights) for SM89, dense and at half its widths with square heads; "
        "layers that aren't quantised are in FP16:"
    )
    lines = [
        [
            row["model"],
            row["precision"].upper(),
            f"{row['plan_bytes'] / 1e6:.1f}",
            str(row["kernels"]),
            f"{row['fused_attention']} of {row['attention_sites']}",
        ]
        for row in rows
    ]
    return f"{text}\n\n{table(['DeiT-S', 'precision', 'plan MB', 'kernels', 'fused attention'], lines)}"


def _cpu(rows: Sequence[dict[str, Any]]) -> str:
    text = "DeiT-S in ONNX Runtime on two CPU threads, speed-up over the dense FP32 graph (95 % interval), interleaved:"
    batches = [line["batch"] for line in rows[0]["rows"]]
    lines = [
        [row["model"], row["precision"].upper(), *(_speedup(line["speedup"]) for line in row["rows"])] for row in rows
    ]
    return f"{text}\n\n{table(['DeiT-S', 'precision', *(f'batch {batch}' for batch in batches)], lines)}"


def _speedup(interval: Sequence[float | None]) -> str:
    value, low, high = ("-" if each is None else f"{each:.2f}" for each in interval)
    return f"{value} ({low} to {high})"
