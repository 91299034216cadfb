"""Tables of the errors of methods on the digits, a ViT that is hard to prune, and a text encoder."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.pages.markdown import table

METHODS = ("best, closed loop", "best", "corp", "corp-v1", "none")
MLP_METHODS = (
    "best",
    "corp",
    "corp-v1",
    "grail",
    "grail, symmetric closed loop",
    "grail-fold",
    "fold",
    "vbp",
    "none",
)
SPARSITIES = (0.3, 0.5, 0.7, 0.875)


def _errors(record: dict[str, Any], kind: str, methods: Sequence[str]) -> str:
    """Return a table with a row for each model and method: mean error and accuracy over the calibration seeds."""
    rows = []
    for model in record["models"]:
        for method in methods:
            key = model["name"], kind, method
            every = [row for row in record["rows"] if (row["model"], row["kind"], row["method"]) == key]
            if not every:
                continue
            cells = []
            for sparsity in SPARSITIES:
                found = [row for row in every if row["sparsity"] == sparsity]
                error, accuracy = (mean(row[key] for row in found) for key in ("relative_error", "accuracy"))
                cells.append(f"{error:.4f} ({accuracy:.1%})")
            rows.append([f"{model['name']} (dense {model['accuracy']:.1%})", method, *cells])
    return table(["model", "method", *(f"{sparsity:.1%}" for sparsity in SPARSITIES)], rows)


def methods(record: dict[str, Any]) -> str:
    """Return the logit errors of joint reductions, and of reductions of MLPs alone."""
    text = "Relative logit error (and accuracy) on held-out images at equal widths, joint MLP and Q/K sparsity, "
    text += f"{record['calibration_images']} calibration images, mean of the calibration seeds:"
    parts = [
        text,
        _errors(record, "joint", METHODS),
        "The same for MLPs alone, including presets that reduce only MLPs:",
    ]
    parts.append(_errors(record, "mlp", MLP_METHODS))
    return "\n\n".join([*parts, *record.get("remarks", [])])


def hard_vit(record: dict[str, Any]) -> str:
    """Return the table of a model trained without redundancy: error, accuracy and its change by each method."""
    sparsities = sorted({row["sparsity"] for row in record["rows"]})
    cells: dict[str, dict[float, list[str]]] = {}
    for row in record["rows"]:
        change, low, high = row["points"]
        error = f"{row['relative_error']:.3f} ({row['accuracy']:.1%})"
        shown = [f"{row['macs_share']:.2f}", error, f"{change:+.1f} ({low:+.1f} to {high:+.1f})"]
        cells.setdefault(row["method"], {})[row["sparsity"]] = shown
    blank = ["-"] * 3
    lines = [[method, *(cell for each in sparsities for cell in of.get(each, blank))] for method, of in cells.items()]
    head = [name for each in sparsities for name in (f"MACs at {each:.0%}", "error (accuracy)", "points (95 %)")]
    low, high = record["dense_accuracy_interval"]
    text = (
        f"A ViT trained to be hard to prune ({record['model']['depth']} blocks, width {record['model']['embed_dim']}; "
        "training keeps hidden channels, queries and keys equally strong and uncorrelated) on "
        f"{record['classes']} classes of the procedural images. The dense accuracy is {record['dense_accuracy']:.1%} "
        f"({low:.1%} to {high:.1%}) on {record['held_out_images']:,} held-out images. Calibrated on "
        f"{record['calibration_images']} images; labels serve only to judge; `by site` has the MACs of uniform widths. "
        "Relative logit error, accuracy and its change in points with a paired interval:"
    )
    return "\n\n".join([text, table(["method", *head], lines), *record.get("remarks", [])])


def text_encoder(record: dict[str, Any]) -> str:
    """Return the table of a model with little redundancy: mean errors as shares of preset corp's error."""
    found: dict[tuple[str, float, int], dict[str, list[dict[str, Any]]]] = {}
    for row in record["rows"]:
        case = row["kind"], row["sparsity"], row["calibration_tokens"]
        found.setdefault(case, {}).setdefault(row["method"], []).append(row)
    names = list(dict.fromkeys(row["method"] for row in record["rows"] if row["method"] != "corp"))
    lines = []
    for (kind, sparsity, tokens), by_method in found.items():
        cells = [
            f"{mean(row['of_corp'] for row in by_method[name]):.3f}" if name in by_method else "-" for name in names
        ]
        corp = f"{mean(row['error'] for row in by_method['corp']):.3f}"
        lines.append([kind, f"{sparsity:.0%}", f"{tokens:,}", corp, *cells])
    text = (
        "A pretrained 6-layer text encoder with little redundancy: relative error of the pooled output on held-out "
        "text with preset corp, and the errors of the other methods as shares of it (uniform widths unless `by site`; "
        "means over the seeds):"
    )
    whole = table(["removed from", "share", "calibration tokens", "corp", *names], lines)
    return "\n\n".join([text, whole, *record.get("remarks", [])])
