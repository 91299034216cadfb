"""The table of what goes through the whole chain."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.pages.markdown import table

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
    count = {source: sum(row["source"] == source for row in gone) for source in ("timm", "transformers")}
    text = (
        f"What goes through the whole chain: {count['timm']} of timm's names and {count['transformers']} classes of "
        "transformers, made small, with random weights and inputs; half of every MLP, attention and row of "
        "convolutions removed. Relative errors of the outputs on other inputs (means of a line's models), ONNX Runtime "
        "beside torch (the worst of them, batches 1 and 8), and TensorRT-RTX's fused attention in half precision:"
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
        f"`best` errs least in {is_better} of them; where it does not in a first draw of weights and inputs, errors "
        f"are means over {max(row['draws'] for row in gone)} draws. Near 1 nothing of the dense answer is left, and "
        "who errs least says little: random convolutional networks amplify what is lost. The share is that of the "
        "multiply-adds within sites; seconds are those of one core to trace and to find:"
    )
    failed = [f"{row['class']} ({row['source']}): {row['said']}" for row in record["rows"] if "said" in row]
    told = ["Not taken, with what was said: " + "; ".join(failed) + "."] if failed else []
    return "\n\n".join([text, table(CLASS_HEAD, [_class_line(row) for row in gone]), *told, *record.get("remarks", [])])


NAME_HEAD = ("class", "names", "share of MACs", "kinds of sites", "s to trace, to find")


def _name_line(kind: str, rows: Sequence[Row]) -> list[str]:
    """Of one class: least and most of its names, seconds in the middle."""
    shares = sorted(row["share"] for row in rows)
    kinds = sorted({each for row in rows for each in row["sites"]})
    seconds = [median(row[part] for row in rows) for part in ("trace_s", "find_s")]
    told = f"{shares[0]:.2f}" if len(rows) == 1 else f"{shares[0]:.2f} to {shares[-1]:.2f}"
    return [kind, str(len(rows)), told, ", ".join(kinds), ", ".join(f"{each:.1f}" for each in seconds)]


def names(record: Mapping[str, Any]) -> str:
    """By class: how much of every name of timm is within sites that its program has."""
    every = [dict(zip(record["columns"], line, strict=False)) for line in record["rows"]]
    found = [row for row in every if row.get("sites")]
    seconds = sorted(row["trace_s"] + row["find_s"] for row in found)
    at_most_5, grown = sum(each <= 5 for each in seconds) / len(seconds), max(row["grown_mib"] for row in found)
    text = (
        f"{len(every)} of timm's names without weights, each in its own size (`python -m benchmarks.coverage.names`): "
        f"{len(found)} have sites, {sum(row['share'] >= 0.5 for row in found)} at least half of their multiply-adds "
        f"within them. To trace and find takes {median(seconds):.1f} s of one core in the middle, at most 5 s for "
        f"{at_most_5:.0%} of them, {seconds[-1]:.0f} s at most; memory grows by {grown:,} MiB "
        "at most. Whether a family knows a name makes no difference here:"
    )
    by_class: dict[str, list[Row]] = {}
    for row in sorted(found, key=lambda each: str(each["class"]).lower()):
        by_class.setdefault(row["class"], []).append(row)
    none = [f"`{row['name']}` ({row.get('said') or 'no site'})" for row in every if not row.get("sites")]
    told = ["Without sites: " + "; ".join(none) + "."] if none else []
    lines = [_name_line(kind, rows) for kind, rows in by_class.items()]
    return "\n\n".join([text, table(NAME_HEAD, lines), *told, *record.get("remarks", [])])
