"""Tables of engines: head geometries, fusion breaks and plans for several GPUs."""

from collections.abc import Sequence
from typing import Any

from benchmarks.pages.markdown import Column, Row, paragraphs, table_of


def break_fusion(record: Row) -> str:
    """Return the table of plans with and without fusion breaks, and the cost of several targets."""
    by_site: dict[str, list[Row]] = {}
    for row in record["rows"]:
        by_site.setdefault(row["break"], []).append(row)
    targets = ", ".join(dict.fromkeys(row["target"] for row in record["rows"]))
    text = (
        f"`export --break-fusion SITE` for {record['depth']} blocks of a ViT-S, FP16, as TensorRT-RTX "
        f"{record['library_version']} plans of batches 1:8:64 for SM {targets} (equal except for their bytes), built "
        "without a GPU. Memory is that of weights and activations as the builder reports it. A break at a module's "
        "output keeps the module out of the next kernel; a break at a softmax splits the fused attention kernel:"
    )
    columns: dict[str, Column] = {
        "fusion broken at": lambda row: f"`{row['break']}`" if row["break"] else "nothing",
        "kernels": lambda row: _extent([each["kernels"] for each in by_site[row["break"]]]),
        "fused attention": lambda row: _extent([len(each["fused_attention"]) for each in by_site[row["break"]]]),
        "plan MB": lambda row: f"{row['plan_bytes'] / 1e6:.2f}",
        "device memory MB": lambda row: _extent([_memory(each) for each in by_site[row["break"]]], ".1f"),
    }
    return paragraphs(text, table_of((rows[0] for rows in by_site.values()), columns), _several_targets(record))


def _memory(row: Row) -> float:
    return float(max(row["device_memory_bytes"].values()) / 1e6)


def _extent(values: Sequence[Any], form: str = "") -> str:
    """Return the smallest and the largest value, or one where both look alike."""
    return " to ".join(dict.fromkeys(format(each, form) for each in (min(values), max(values))))


def _several_targets(record: Row) -> str:
    price = record["compatibility"]["targets"]
    own, alone = price["own"], next(plan for plan in price["plans"] if plan["target"] == "sm86")
    portable = record["compatibility"]["portable"]
    same = all(plan["kernels"] == portable["own"]["kernels"] for plan in portable["plans"])
    return (
        f"One plan for SM 75, 86 and 89 (`build --compatibility targets`) needs "
        f"{100 * (own['plan_bytes'] / alone['plan_bytes'] - 1):.1f} % more bytes and "
        f"{100 * (own['device_memory_bytes'] / alone['device_memory_bytes'] - 1):.0f} % more memory than a plan for SM "
        f"86 alone ({own['kernels']} kernels for {alone['kernels']}). A `portable` plan, for SM 80 and newer, "
        f"{'has as many kernels as' if same else 'has other kernels than'} a plan for each of its targets. The times "
        "were not measured, which needs a GPU; `build` prints the commands."
    )


def engines(record: Row) -> str:
    """Return the table of fused attention, kernels and plan sizes."""
    columns: dict[str, Column] = {
        "model": "{model}",
        "heads": "{variant}",
        "GMAC": lambda row: f"{row['macs'] / 1e9:.2f}",
        "fused attention": "{fused_attention} of {blocks}",
        "kernels": "{kernels}",
        "plan MB": lambda row: f"{row['plan_bytes'] / 1e6:.1f}",
    }
    text = "TensorRT-RTX engines built without a GPU, FP16, SM86, 50 % joint sparsity; two builds give equal bytes:"
    return paragraphs(text, table_of(record["rows"], columns))
