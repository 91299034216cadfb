"""The table of errors and engines in FP16 and BF16."""

from typing import Any

from benchmarks.pages.markdown import table


def bf16(record: dict[str, Any]) -> str:
    """Return the table of errors, plan sizes and fused attention by precision."""
    text = (
        "Relative error of the outputs of each graph, computed in the graph's types, against the model in float32, and "
        f"TensorRT-RTX's plan of the graph for SM{record['target']}. Mixed graphs keep the last "
        f"{record['kept_blocks']} blocks in FP32. Inputs are held-out images, for DeiT-S noise:"
    )
    rows = [
        [
            model["model"],
            row["precision"],
            f"{row['relative_error']:.1e}",
            "-" if row["same_class"] is None else f"{row['same_class']:.1%}",
            f"{row['graph_bytes'] / 1e6:.2f}",
            f"{row['plan_bytes'] / 1e6:.2f}",
            str(row["kernels"]),
            f"{row['fused_attention']} of {row['attention_sites']}",
        ]
        for model in record["models"]
        for row in model["rows"]
    ]
    columns = ["model", "precision", "error", "same class", "graph MB", "plan MB", "kernels", "fused attention"]
    return text + "\n\n" + table(columns, rows)
