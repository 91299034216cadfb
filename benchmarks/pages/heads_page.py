"""The table of whole heads, from the record of benchmarks/quality/whole_heads.py."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table


def _engine(engine: Mapping[str, Any] | None) -> list[str]:
    """Fused attention, kernels and megabytes of a plan."""
    if engine is None:
        return ["-"] * 3
    fused = f"{engine['fused_attention']} of {engine['attention_sites']}"
    return [fused, str(engine["kernels"]), f"{engine['plan_bytes'] / 1e6:.1f}"]


def whole_heads(record: Mapping[str, Any]) -> str:
    """Heads that went whole beside narrower ones."""
    rows, shown = list[list[str]](), set[tuple[Any, ...]]()
    for row in record["rows"]:
        key = (row["model"], row["way"], row["heads"], row["qk"], row["v"])
        if key in shown:
            continue
        shown.add(key)
        size = f"{row['heads']} of {row['qk']}" + (f" and {row['v']}" if row["qk"] != row["v"] else "")
        figures = [f"{row['attention_macs']:.2f}", f"{row['error']:.4f}"]
        rows.append([row["model"], row["way"], size, *figures, *_engine(row["engine"])])
    head = ["model", "removed", "heads", "attention MACs", "error", "fused attention", "kernels", "plan MB"]
    text = (
        "Whole heads (`--whole-heads`, by OBS and as preset `grail` does) beside narrower ones of about the same "
        "multiply-adds, attention alone reduced, preset best, open loop: relative error of the outputs on held-out "
        "images, and TensorRT-RTX plans in FP16 built without a GPU. At like multiply-adds narrower square heads lost "
        "less on both models and their plans have as many kernels, so narrow heads first. Remove whole heads if some "
        "are redundant, if fewer softmaxes save time (not timed here), or if narrower heads would not be fused by an "
        "engine (8 on digits). A single remaining head is not fused either, and `reduce` warns of it. Queries "
        "and keys of 8, padded, are the most that narrowing them alone removes:"
    )
    return text + "\n\n" + table(head, rows)
