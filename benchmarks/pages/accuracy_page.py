"""Tables of the errors of methods on the digits, a ViT that is hard to prune, and a text encoder."""

from collections.abc import Sequence

from benchmarks.pages.markdown import Column, Row, cross_table, mean_rows, paragraphs, table

METHODS = ("best, closed loop", "best", "corp", "corp-v1", "none")
GRAIL_METHODS = ("grail", "grail, symmetric closed loop", "grail-fold", "fold", "vbp")
MLP_METHODS = ("best", "corp", "corp-v1", *GRAIL_METHODS, "none")
SPARSITIES = (0.3, 0.5, 0.7, 0.875)


def _errors(record: Row, kind: str, methods: Sequence[str]) -> str:
    """Return a table with a line for each model and method: mean error and accuracy over the calibration seeds."""
    dense = {model["name"]: model["accuracy"] for model in record["models"]}
    chosen = [row for row in record["rows"] if row["kind"] == kind and row["method"] in methods]
    rows = [row for row in chosen if row["sparsity"] in SPARSITIES]
    rows.sort(key=lambda row: ([*dense].index(row["model"]), methods.index(row["method"])))
    first: dict[str, Column] = {
        "model": lambda row: f"{row['model']} (dense {dense[row['model']]:.1%})",
        "method": "{method}",
    }
    figures = mean_rows(rows, ("model", "method", "sparsity"), ("relative_error", "accuracy"))
    return cross_table(figures, first, "{sparsity:.1%}", "{relative_error:.4f} ({accuracy:.1%})")


def methods(record: Row) -> str:
    """Return the logit errors of joint reductions, and of reductions of MLPs alone."""
    text = (
        "Relative logit error (and accuracy) on held-out images at equal widths, joint MLP and Q/K sparsity, "
        f"{record['calibration_images']} calibration images, mean of the calibration seeds:"
    )
    alone = "The same for MLPs alone, including presets that reduce only MLPs:"
    return paragraphs(text, _errors(record, "joint", METHODS), alone, _errors(record, "mlp", MLP_METHODS))


def hard_vit(record: Row) -> str:
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
    return paragraphs(text, table(["method", *head], lines))


def text_encoder(record: Row) -> str:
    """Return the table of a model with little redundancy: mean errors as shares of preset corp's error."""
    case = ("kind", "sparsity", "calibration_tokens")
    rows = mean_rows(record["rows"], (*case, "method"), ("error", "of_corp"))
    corp = {tuple(row[name] for name in case): row["error"] for row in rows if row["method"] == "corp"}
    first: dict[str, Column] = {
        "removed from": "{kind}",
        "share": "{sparsity:.0%}",
        "calibration tokens": "{calibration_tokens:,}",
        "corp": lambda row: f"{corp[tuple(row[name] for name in case)]:.3f}",
    }
    text = (
        "A pretrained 6-layer text encoder with little redundancy: relative error of the pooled output on held-out "
        "text with preset corp, and the errors of the other methods as shares of it (uniform widths unless `by site`; "
        "means over the seeds):"
    )
    others = [row for row in rows if row["method"] != "corp"]
    return paragraphs(text, cross_table(others, first, "{method}", "{of_corp:.3f}"))
