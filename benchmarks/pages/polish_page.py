"""The tables of what polishing gains, from the records of benchmarks/quality/polish.py and layer_polish.py."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table

MODELS = {
    "digits": "digits: 75 % removed, logits",
    "minilm": "minilm: 50 %, pooled outputs",
    "dinov2": "dinov2: 50 % without the closed loop, class token",
}


def polish(record: Mapping[str, Any]) -> str:
    """Blocks and whole models polished: the error on inputs never fitted to, before and after."""
    present = {row["model"] for row in record["rows"]}
    models = "; ".join(words for name, words in MODELS.items() if name in present)
    text = (
        "`--polish block` and `--polish model` after the closed form: error on inputs that were used neither to fit "
        f"nor to choose ({models}; minutes with {record['threads']} "
        f"{'thread' if record['threads'] == 1 else 'threads'}). "
        "If no polished model has a smaller error on the held-out inputs, the model stays as it was:"
    )
    rows = [
        [
            row["model"],
            row["polish"],
            str(row["steps"]),
            f"{row['seconds'] / 60:.1f}",
            f"{row['error_before']:.4f}",
            f"{row['error']:.4f}",
        ]
        for row in record["rows"]
    ]
    head = ["model", "polish", "steps", "minutes", "error before", "error after"]
    return "\n\n".join([text, table(head, rows), *record.get("remarks", [])])


def layer_polish(record: Mapping[str, Any]) -> str:
    """Sublayers fitted without gradients and with them."""
    text = (
        "Every sublayer fitted to the dense stream, after a closed loop at 50 %, by `--polish layer` (Gauss-Newton "
        "steps and regressions in turn) and by Adam on the same sublayers: error of the outputs about their mean on "
        "inputs that no step has seen, and CPU seconds:"
    )
    rows = [[row["model"], row["how"], f"{row['error']:.4f}", f"{row['cpu_seconds']:.0f}"] for row in record["rows"]]
    return text + "\n\n" + table(["model", "fit", "error", "CPU s"], rows)
