"""The methods benchmark's record as a Markdown page. Reads the record alone."""

from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]


def _mean(rows: Rows, key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


def _cell(rows: Rows) -> str:
    """Mean error over the seeds, its range where there are several, and accuracy."""
    if not rows:
        return "-"
    errors = [row["relative_error"] for row in rows]
    spread = f" ({min(errors):.4f}-{max(errors):.4f})" if len(errors) > 1 else ""
    return f"{_mean(rows, 'relative_error'):.4f}{spread}, {_mean(rows, 'accuracy'):.1%}, {_mean(rows, 'agreement'):.1%}"


def _table(rows: Rows, sparsities: Sequence[float]) -> list[str]:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = ["| method | " + " | ".join(f"{each:.1%}" for each in sparsities) + " |"]
    lines.append("|---" * (len(sparsities) + 1) + "|")
    for method in methods:
        cells = [_cell([r for r in rows if r["method"] == method and r["sparsity"] == each]) for each in sparsities]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def _ratio(rows: Rows, method: str, other: str, sparsity: float) -> str:
    here = [row for row in rows if row["sparsity"] == sparsity]
    one = [row for row in here if row["method"] == method]
    two = [row for row in here if row["method"] == other]
    return f"{_mean(one, 'relative_error') / _mean(two, 'relative_error'):.3f}" if one and two else "-"


def _widths(rows: Rows, sparsities: Sequence[float]) -> str:
    told = []
    for each in sparsities:
        row = next(row for row in rows if row["sparsity"] == each and not row["component"])
        told.append(f"{each:.1%}: hidden {row['hidden']}, q/k {row['qk']}, v {row['v']}")
    return "Widths at " + "; ".join(told) + "."


def page(record: dict[str, Any]) -> str:
    """Per model and kind: every preset's error, accuracy and agreement; then the components, one at a time."""
    lines = [
        "# Methods at equal widths",
        "",
        f"Written by `benchmarks/quality/methods.py`. {record['calibration_images']} calibration images without "
        "labels; cells are relative error of the logits (mean over calibration seeds, range), accuracy, agreement with "
        "the dense model, all on held-out images. Widths are the same for every method and given exactly: heads under "
        "8 are less than `corp-deploy reduce` would choose.",
        *(line for remark in record.get("remarks", []) for line in ("", remark)),
    ]
    for model in record["models"]:
        every = [row for row in record["rows"] if row["model"] == model["name"]]
        sparsities = sorted({row["sparsity"] for row in every})
        lines += ["", f"## {model['name']}", ""]
        lines.append(
            f"Dense accuracy {model['accuracy']:.1%} on {model['held_out_images']} held-out images of "
            f"{model['classes']} classes."
        )
        for kind in ("mlp", "attention", "joint"):
            rows = [row for row in every if row["kind"] == kind]
            lines += ["", f"### {kind}", "", _widths(rows, sparsities), ""]
            lines += _table([row for row in rows if not row["component"]], sparsities)
        joint = [row for row in every if row["kind"] == "joint"]
        lines += ["", "Error of `best` as a share of `corp`'s, joint: " + _ratios(joint, "best", "corp", sparsities)]
        lines += [
            "",
            "Closed loop as a share of `best`, joint: " + _ratios(joint, "best, closed loop", "best", sparsities),
        ]
        lines += [
            "",
            "With first layers aligned as a share of without, joint: "
            + _ratios(joint, "best, closed loop", "best, closed loop, first layers not aligned", sparsities),
        ]
        lines += ["", "### `best` with one component toggled, joint", ""]
        lines += ["Square heads have smaller values too, so those rows are not at equal widths.", ""]
        lines += _table([row for row in joint if row["component"] or row["method"].startswith("best")], sparsities)
    return "\n".join(lines) + "\n"


def _ratios(rows: Rows, method: str, other: str, sparsities: Sequence[float]) -> str:
    return ", ".join(f"{_ratio(rows, method, other, each)} at {each:.1%}" for each in sparsities) + "."
