"""The table of what goes through the whole chain."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.markdown import table

Row = Mapping[str, Any]
HEAD = (
    "family",
    "models",
    "sites of one",
    "stays, and why",
    "error of half: none, corp, best",
    "FP32 graph beside torch",
    "fused attention: dense, reduced",
)


def _sites(row: Row) -> str:
    """How many of each kind of the instance can be reduced."""
    told = {"mlps": "MLPs", "attentions": "attentions", "rows": "rows of convolutions"}
    parts = [f"{row[kind]} {name}" for kind, name in told.items() if row.get(kind)]
    whole = [f"{name.upper()} of {count} whole" for name, count in row["kept"].items() if count]
    return ", ".join(parts + whole) or "none"


def _fused(rows: Sequence[Row], which: str) -> str:
    """Fused of all attention sites of these engines."""
    engines = [row["engines"][which] for row in rows]
    if None in engines:
        return "not built"
    sites = sum(engine["sites"] for engine in engines)
    return f"{sum(engine['fused'] for engine in engines)} of {sites}" if sites else "-"


def _errors(rows: Sequence[Row]) -> str:
    """Means over the models."""
    return ", ".join(f"{sum(row['errors'][preset] for row in rows) / len(rows):.3f}" for preset in rows[0]["errors"])


def _line(family: str, rows: Sequence[Row]) -> list[str]:
    names = ", ".join(f"`{row['name']}`" for row in rows)
    reasons = sorted({reason for row in rows for reason in row["reasons"]})
    sites = " or ".join(dict.fromkeys(_sites(row) for row in rows))
    worst = max(row["graphs"]["fp32"] for row in rows)
    fused = f"{_fused(rows, 'dense')}; {_fused(rows, 'reduced')}"
    return [family, names, sites, "; ".join(reasons) or "-", _errors(rows), f"{worst:.0e}", fused]


def _by_family(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    families: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        families.setdefault((row["source"], row["family"]), []).append(row)
    return families


def coverage(record: Mapping[str, Any]) -> str:
    """By family: what was tried, what of it can be reduced, and what became of it."""
    gone = [row for row in record["rows"] if "refused" not in row]
    count = {source: sum(row["source"] == source for row in gone) for source in ("timm", "transformers", "torchvision")}
    text = (
        f"What goes through the whole chain: {count['timm']} of timm's names, {count['transformers']} classes of "
        f"transformers and {count['torchvision']} of torchvision, made small, with random weights and inputs; half of "
        "every MLP, attention and row of convolutions removed. Relative errors of the outputs on other inputs (means "
        "of a line's models), ONNX Runtime beside torch (the worst of them, batches 1 and 8), and TensorRT-RTX's fused "
        "attention in half precision:"
    )
    lines = [
        _line(family if source == "timm" else f"{family} ({source})", rows)
        for (source, family), rows in _by_family(gone).items()
    ]
    refused = [f"`{row['name']}`: {row['refused']}" for row in record["rows"] if "refused" in row]
    parts = [text, table(HEAD, lines)]
    told = ["Refused, with the reason: " + "; ".join(refused) + "."] if refused else []
    return "\n\n".join([*parts, *told, *record.get("remarks", [])])


CLASS_HEAD = ("class", "sites", "share of MACs", "stays, and why", "error of half: none, corp, best", "FP32 graph", "s")


def _reasons(refused: Mapping[str, int]) -> str:
    """Each reason once, however many layers it names."""
    return "; ".join(f"{count}: {reason}" for reason, count in refused.items()) or "-"


def _class_line(row: Row) -> list[str]:
    sites = ", ".join(f"{count} {kind}" for kind, count in row["sites"].items()) or "none"
    errors = ", ".join(f"{row['errors'][preset]:.3f}" for preset in row["errors"])
    name, share = f"{row['class']} ({row['source']})", f"{row['share']:.2f}"
    graph, seconds = f"{row['graphs']['fp32']:.0e}", f"{row['trace_s'] + row['find_s']:.1f}"
    return [name, sites, share, _reasons(row["refused"]), errors, graph, seconds]


def classes(record: Mapping[str, Any]) -> str:
    """By class: what was found in one small model of it that no family served, and what became of it."""
    gone = [row for row in record["rows"] if "said" not in row]
    is_better = sum(row["errors"]["best"] < min(row["errors"]["none"], row["errors"]["corp"]) for row in gone)
    text = (
        f"One small model of each of {len(gone)} classes whose sites are found in the traced program (`python -m "
        "benchmarks.coverage.classes`), with random weights and inputs, half of every site but streams removed. "
        f"`best` errs less than `none` and `corp` in {is_better} of them. The share is that of the multiply-adds "
        "within sites; seconds are those of one core to trace and to find:"
    )
    failed = [f"{row['class']} ({row['source']}): {row['said']}" for row in record["rows"] if "said" in row]
    told = ["Not taken, with what was said: " + "; ".join(failed) + "."] if failed else []
    return "\n\n".join([text, table(CLASS_HEAD, [_class_line(row) for row in gone]), *told, *record.get("remarks", [])])
