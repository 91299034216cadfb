"""The table of what sixteen bits cost."""

from typing import Any

from benchmarks.pages.markdown import table


def bf16(record: dict[str, Any]) -> str:
    """Errors, plan sizes and fused attention by precision."""
    text = (
        "Sixteen bits: relative error of the outputs of each graph, computed as it is typed, against the model in "
        f"float32, and TensorRT-RTX's plan of it for SM{record['target']}; mixed graphs keep the last "
        f"{record['kept_blocks']} blocks in FP32 (DeiT-S sees noise, the others held-out images):"
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
