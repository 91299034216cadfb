"""Tables of FP16, BF16, INT8 and FP8."""

from collections.abc import Sequence

from benchmarks.pages.markdown import Column, Row, cross_table, interval, paragraphs, table_of

WAYS = ("plain", "balanced", "mse", "entropy", "auto")
FUSED: Column = "{fused_attention} of {attention_sites}"


def _megabytes(field: str, digits: int = 2) -> Column:
    return lambda row: f"{row[field] / 1e6:.{digits}f}"


def bf16(record: Row) -> str:
    """Return the table of errors, plan sizes and fused attention by precision."""
    text = (
        "Relative error of the outputs of each graph, computed in the graph's types, against the model in float32, and "
        f"TensorRT-RTX's plan of the graph for SM{record['target']}. Mixed graphs keep the last "
        f"{record['kept_blocks']} blocks in FP32. Inputs are held-out images, for DeiT-S noise:"
    )
    columns: dict[str, Column] = {
        "model": "{model}",
        "precision": "{precision}",
        "error": "{relative_error:.1e}",
        "same class": "{same_class:.1%}",
        "graph MB": _megabytes("graph_bytes"),
        "plan MB": _megabytes("plan_bytes"),
        "kernels": "{kernels}",
        "fused attention": FUSED,
    }
    rows = [{"model": model["model"], **row} for model in record["models"] for row in model["rows"]]
    return paragraphs(text, table_of(rows, columns))


def quantised(record: Row) -> str:
    """Return the tables of errors, engines and speed on a CPU, as far as the record has them."""
    parts = {"quality": _quality, "plans": _plans, "cpu": _cpu}
    return paragraphs(*(made(record[name]) for name, made in parts.items() if name in record))


def _quality(rows: Sequence[Row]) -> str:
    text = (
        "Relative error of the outputs of each INT8 and FP8 graph against the FP32 graph on held-out images (and "
        "accuracy); all other operations are in FP32. `plain` ends each range at the largest value, `balanced` first "
        "moves outliers of norms into the next layer's weights, `mse` and `entropy` also clip the ranges, and `auto`, "
        "the default, uses the rule with the smallest error on the images that the ranges come from:"
    )
    first: dict[str, Column] = {"model": "{model}", "format": lambda row: row["precision"].upper()}
    eight = [row for row in rows if row["precision"] in ("int8", "fp8")]
    dense = {row["model"]: row.get("accuracy") for row in rows if row["precision"] == "fp32"}
    beside = [
        f"{row['model']} {_error(row)}"
        + ("" if dense[row["model"]] is None else f", {dense[row['model']]:.1%} in FP32")
        for row in rows
        if row["precision"] == "fp16"
    ]
    return paragraphs(
        text, cross_table(eight, first, "{way}", _error, WAYS), f"FP16 for comparison: {', '.join(beside)}."
    )


def _error(row: Row) -> str:
    return f"{row['error']:.4f}" + (f" ({row['accuracy']:.1%})" if "accuracy" in row else "")


def _plans(rows: Sequence[Row]) -> str:
    text = (
        "TensorRT-RTX's plans of DeiT-S (random weights) for SM89, dense and at half its widths with square heads; "
        "layers that aren't quantised are in FP16:"
    )
    columns: dict[str, Column] = {
        "DeiT-S": "{model}",
        "precision": lambda row: row["precision"].upper(),
        "plan MB": _megabytes("plan_bytes", 1),
        "kernels": "{kernels}",
        "fused attention": FUSED,
    }
    return paragraphs(text, table_of(rows, columns))


def _cpu(rows: Sequence[Row]) -> str:
    text = "DeiT-S in ONNX Runtime on two CPU threads, speed-up over the dense FP32 graph (95 % interval), interleaved:"
    lines = [{**row, **line} for row in rows for line in row["rows"]]
    first: dict[str, Column] = {"DeiT-S": "{model}", "precision": lambda row: row["precision"].upper()}
    return paragraphs(text, cross_table(lines, first, "batch {batch}", lambda row: interval(row["speedup"])))
