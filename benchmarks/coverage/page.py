"""Tables of the models that were reduced, exported and built."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.pages.markdown import table

Row = Mapping[str, Any]
HEAD = (
    "family",
    "models",
    "sites of one",
    "keeps its width, reason",
    "error of half: none, corp, best",
    "FP32 graph against torch",
    "fused attention: dense, reduced",
)


def _sites(row: Row) -> str:
    """Return the number of reducible sites of each kind."""
    nouns = {"mlps": "MLPs", "attentions": "attentions", "rows": "rows of convolutions"}
    parts = [f"{row[kind]} {name}" for kind, name in nouns.items() if row.get(kind)]
    whole = [f"{name.upper()} of {count} whole" for name, count in row["kept"].items() if count]
    return ", ".join(parts + whole) or "none"


def _fused(rows: Sequence[Row], which: str) -> str:
    """Return how many attention sites of these engines are fused."""
    engines = [row["engines"][which] for row in rows]
    if None in engines:
        return "not built"
    sites = sum(engine["sites"] for engine in engines)
    return f"{sum(engine['fused'] for engine in engines)} of {sites}" if sites else "-"


def _errors(rows: Sequence[Row]) -> str:
    """Return the mean error of each preset over the models."""
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
    """Return the table of families: models, sites, errors and engines."""
    built = [row for row in record["rows"] if "refused" not in row]
    count = {source: sum(row["source"] == source for row in built) for source in ("timm", "transformers")}
    text = (
        f"{count['timm']} names of timm and {count['transformers']} classes of transformers, in small sizes, with "
        "random weights and inputs; half of every MLP, attention and row of convolutions removed. Errors are relative "
        "errors of the outputs on other inputs, means over the models of a row. The FP32 graph in ONNX Runtime is "
        "compared with torch (largest error, batch sizes 1 and 8). Fused attention is that of TensorRT-RTX in FP16:"
    )
    lines = [
        _line(family if source == "timm" else f"{family} ({source})", rows)
        for (source, family), rows in _by_family(built).items()
    ]
    refused = [f"`{row['name']}`: {row['refused']}" for row in record["rows"] if "refused" in row]
    parts = [text, table(HEAD, lines)]
    reasons = ["Refused, with the reason: " + "; ".join(refused) + "."] if refused else []
    return "\n\n".join([*parts, *reasons, *record.get("remarks", [])])


CLASS_HEAD = (
    "class",
    "sites",
    "share of MACs",
    "keeps its width, reason",
    "error of half: none, corp, best",
    "FP32 graph",
    "s",
)


def _reasons(refused: Mapping[str, int]) -> str:
    """Return each reason once, with the number of its layers."""
    return "; ".join(f"{count}: {reason}" for reason, count in refused.items()) or "-"


def _class_line(row: Row) -> list[str]:
    sites = ", ".join(f"{count} {kind}" for kind, count in row["sites"].items()) or "none"
    errors = ", ".join(f"{row['errors'][preset]:.3f}" for preset in row["errors"])
    name, share = f"{row['class']} ({row['source']})", f"{row['share']:.2f}"
    graph, seconds = f"{row['graphs']['fp32']:.0e}", f"{row['trace_s'] + row['find_s']:.1f}"
    return [name, sites, share, _reasons(row["refused"]), errors, graph, seconds]


def classes(record: Mapping[str, Any]) -> str:
    """Return the table of classes without a family: sites, errors and seconds of one small model of each."""
    found = [row for row in record["rows"] if "said" not in row]
    is_better = sum(row["errors"]["best"] < min(row["errors"]["none"], row["errors"]["corp"]) for row in found)
    text = (
        f"One small model of each of {len(found)} classes (`python -m benchmarks.coverage.classes`), with random "
        "weights and inputs; half of every site removed, except residual streams. "
        f"Preset `best` has the smallest error in {is_better} of them; if it has not in a first draw of weights and "
        f"inputs, errors are means over {max(row['draws'] for row in found)} draws. Errors near 1 hardly compare "
        "presets: random convolutional networks amplify the loss. The share is that of the multiply-adds within sites. "
        "Seconds are those of one core to trace the model and to find its sites:"
    )
    failed = [f"{row['class']} ({row['source']}): {row['said']}" for row in record["rows"] if "said" in row]
    errors = ["Failed, with the error: " + "; ".join(failed) + "."] if failed else []
    lines = [_class_line(row) for row in found]
    return "\n\n".join([text, table(CLASS_HEAD, lines), *errors, *record.get("remarks", [])])


NAME_HEAD = ("class", "names", "share of MACs", "kinds of sites", "s to trace, to find")


def _name_line(kind: str, rows: Sequence[Row]) -> list[str]:
    """Return the row of a class: range of the shares of its names, and median seconds."""
    shares = sorted(row["share"] for row in rows)
    kinds = sorted({each for row in rows for each in row["sites"]})
    seconds = [median(row[part] for row in rows) for part in ("trace_s", "find_s")]
    extent = f"{shares[0]:.2f}" if len(rows) == 1 else f"{shares[0]:.2f} to {shares[-1]:.2f}"
    return [kind, str(len(rows)), extent, ", ".join(kinds), ", ".join(f"{each:.1f}" for each in seconds)]


def names(record: Mapping[str, Any]) -> str:
    """Return the table of timm's names: the share of their multiply-adds within sites, by class."""
    every = [dict(zip(record["columns"], line, strict=False)) for line in record["rows"]]
    found = [row for row in every if row.get("sites")]
    seconds = sorted(row["trace_s"] + row["find_s"] for row in found)
    at_most_5, grown = sum(each <= 5 for each in seconds) / len(seconds), max(row["grown_mib"] for row in found)
    text = (
        f"{len(every)} names of timm without weights, each in its own size (`python -m benchmarks.coverage.names`). "
        f"{len(found)} have sites; {sum(row['share'] >= 0.5 for row in found)} have at least half of their "
        f"multiply-adds within sites. Tracing and finding sites takes {median(seconds):.1f} s of one core (median), "
        f"at most 5 s for {at_most_5:.0%} of the names, and at most {seconds[-1]:.0f} s; memory grows by at most "
        f"{grown:,} MiB:"
    )
    by_class: dict[str, list[Row]] = {}
    for row in sorted(found, key=lambda each: str(each["class"]).lower()):
        by_class.setdefault(row["class"], []).append(row)
    none = [f"`{row['name']}` ({row.get('said') or 'no site'})" for row in every if not row.get("sites")]
    without = ["Without sites: " + "; ".join(none) + "."] if none else []
    lines = [_name_line(kind, rows) for kind, rows in by_class.items()]
    return "\n\n".join([text, table(NAME_HEAD, lines), *without, *record.get("remarks", [])])
