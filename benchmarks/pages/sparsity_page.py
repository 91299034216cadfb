"""The page of 2:4 weights: beside widths at equal multiply-adds, and what TensorRT-RTX makes of them."""

from typing import Any

from benchmarks.pages.markdown import table


def sparsity(record: dict[str, Any]) -> str:
    """Error and nominal share of the MACs, a column a model."""
    rows = {(row["model"], row["method"]): row for row in record["rows"]}
    models = list(dict.fromkeys(model for model, _ in rows))
    methods = list(dict.fromkeys(method for _, method in rows))
    lines = [[method, *(_cell(rows.get((model, method))) for model in models)] for method in methods]
    sizes = ", ".join(_size(record, model) for model in models)
    text = (
        "Weights made 2:4 sparse (`reduce --sparse 2:4`) beside narrower layers (`best`): error of the outputs on "
        "held-out inputs, relative to the dense ones about their mean, and the share of the dense MACs, of 2:4 "
        f"counted as if every zero were skipped; `2:4` is the default, patterns by exact cost, refitted. Fitted to and "
        f"judged by: {sizes}."
    )
    return "\n\n".join([text, table(["", *models], lines)])


def _cell(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['error']:.4f} at {row['macs_share']:.2f}"


def _size(record: dict[str, Any], model: str) -> str:
    row = next(row for row in record["rows"] if row["model"] == model)
    return f"{model} {row['fitted']} and {row['held_out']}"


def sparse_engines(record: dict[str, Any]) -> str:
    """Whether the flag changes TensorRT-RTX's plans."""
    plans: dict[str, set[str]] = {}
    for row in record["rows"]:
        plans.setdefault(row["target"], set()).add(row["plan_sha256"])
    same = [target for target, digests in plans.items() if len(digests) == 1]
    lines = sum(row["lines_on_sparsity"] for row in record["rows"])
    others = [target for target in plans if target not in same]
    changed = f"; other plans for SM {', '.join(others)}" if others else ""
    return (
        f"TensorRT-RTX {record['rows'][0]['version']} accepts the flag for sparse weights without effect: two ViT-S "
        f"blocks in FP16, all layers 2:4, built with and without it for SM {', '.join(same)} give the same plans byte "
        f"for byte{changed}, and {lines or 'none'} of the builder's messages mention sparsity; `build --sparse` "
        "refuses it there. TensorRT tries sparse kernels and uses them where they are faster; the engine's record has "
        "its count of sparse layers, and a gate can require some: `sparse_layers < 10`."
    )
