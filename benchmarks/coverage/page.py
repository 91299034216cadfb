"""Tables of the models that were reduced, exported and built."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.pages.markdown import Column, Row, paragraphs, table_of


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
    return ", ".join(f"{fmean(row['errors'][preset] for row in rows):.3f}" for preset in rows[0]["errors"])


FAMILIES: dict[str, Column] = {
    "family": lambda own: own["family"] if own["source"] == "timm" else f"{own['family']} ({own['source']})",
    "models": lambda own: ", ".join(f"`{row['name']}`" for row in own["rows"]),
    "sites of one": lambda own: " or ".join(dict.fromkeys(map(_sites, own["rows"]))),
    "keeps its width, reason": lambda own: (
        "; ".join(sorted({each for row in own["rows"] for each in row["reasons"]})) or "-"
    ),
    "error of half: none, corp, best": lambda own: _errors(own["rows"]),
    "FP32 graph against torch": lambda own: f"{max(row['graphs']['fp32'] for row in own['rows']):.0e}",
    "fused attention: dense, reduced": lambda own: f"{_fused(own['rows'], 'dense')}; {_fused(own['rows'], 'reduced')}",
}
"""Columns of a family: `rows` are those of its models."""


def _grouped(rows: Iterable[Row], *by: str) -> list[dict[str, Any]]:
    """Return a row for each value of the fields `by`, with the list of its `rows`."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [{**dict(zip(by, key, strict=True)), "rows": own} for key, own in groups.items()]


def coverage(record: Row) -> str:
    """Return the table of families: models, sites, errors and engines."""
    built = [row for row in record["rows"] if "refused" not in row]
    count = {source: sum(row["source"] == source for row in built) for source in ("timm", "transformers")}
    text = (
        f"{count['timm']} names of timm and {count['transformers']} classes of transformers, in small sizes, with "
        "random weights and inputs; half of every MLP, attention and row of convolutions removed. Errors are relative "
        "errors of the outputs on other inputs, means over the models of a row. The FP32 graph in ONNX Runtime is "
        "compared with torch (largest error, batch sizes 1 and 8). Fused attention is that of TensorRT-RTX in FP16:"
    )
    refused = "; ".join(f"`{row['name']}`: {row['refused']}" for row in record["rows"] if "refused" in row)
    reasons = refused and f"Refused, with the reason: {refused}."
    return paragraphs(text, table_of(_grouped(built, "source", "family"), FAMILIES), reasons)


CLASSES: dict[str, Column] = {
    "class": "{class} ({source})",
    "sites": lambda row: ", ".join(f"{count} {kind}" for kind, count in row["sites"].items()) or "none",
    "share of MACs": "{share:.2f}",
    "keeps its width, reason": lambda row: "; ".join(f"{n}: {reason}" for reason, n in row["refused"].items()) or "-",
    "error of half: none, corp, best": lambda row: _errors([row]),
    "FP32 graph": "{graphs[fp32]:.0e}",
    "s": lambda row: f"{row['trace_s'] + row['find_s']:.1f}",
}


def classes(record: Row) -> str:
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
    failed = "; ".join(f"{row['class']} ({row['source']}): {row['said']}" for row in record["rows"] if "said" in row)
    return paragraphs(text, table_of(found, CLASSES), failed and f"Failed, with the error: {failed}.")


def _extent(own: Row) -> str:
    """Return the range of the shares of a class's names."""
    shares = sorted(row["share"] for row in own["rows"])
    return f"{shares[0]:.2f}" if len(shares) == 1 else f"{shares[0]:.2f} to {shares[-1]:.2f}"


NAMES: dict[str, Column] = {
    "class": "{class}",
    "names": lambda own: str(len(own["rows"])),
    "share of MACs": _extent,
    "kinds of sites": lambda own: ", ".join(sorted({each for row in own["rows"] for each in row["sites"]})),
    "s to trace, to find": lambda own: ", ".join(
        f"{median(row[part] for row in own['rows']):.1f}" for part in ("trace_s", "find_s")
    ),
}


def names(record: Row) -> str:
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
    none = "; ".join(f"`{row['name']}` ({row.get('said') or 'no site'})" for row in every if not row.get("sites"))
    by_class = _grouped(sorted(found, key=lambda each: str(each["class"]).lower()), "class")
    return paragraphs(text, table_of(by_class, NAMES), none and f"Without sites: {none}.")
