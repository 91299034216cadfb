"""What the demo came to, as figures and as two tables."""

from typing import Any

from rich.table import Table

from corp_deploy.families.counting import macs, parameters
from corp_deploy.store.checkpoint import Checkpoint
from perf.stats.summary import summarise

from .run import Demo

EFFECTS = {"none": "without repair (none)", "grail": "repaired as GRAIL does (grail)", "best": "repaired (best)"}


def _cost(checkpoint: Checkpoint) -> tuple[int, int]:
    return parameters(checkpoint.model), macs(checkpoint.model)


def demo_record(demo: Demo) -> dict[str, Any]:
    """The table's figures."""
    accuracy = [row.accuracy for row in demo.parity.accuracy]
    links = {link.kind: link for link in demo.parity.links}
    rows = {
        "dense": {
            "parameters": _cost(demo.dense)[0],
            "macs": _cost(demo.dense)[1],
            "accuracy": accuracy[0],
            "agreement": 1.0,
        },
        "reduced": {
            "parameters": _cost(demo.reduced)[0],
            "macs": _cost(demo.reduced)[1],
            "accuracy": accuracy[1],
            "agreement": links["reduced"].measures.agreement,
        },
    }
    speed = [
        {
            "batch": row.batch,
            **{
                name: {
                    "p50_ms": None if side.p50_ms is None else side.p50_ms.value,
                    "images_per_s": None if side.throughput is None else side.throughput.value,
                    "status": side.status,
                }
                for name, side in row.sides.items()
            },
            "speedup": None if row.speedup is None else row.speedup.value,
        }
        for row in summarise(demo.bench).rows
    ]
    return {
        "verdict": demo.parity.verdict,
        "line": demo.parity.line,
        "models": rows,
        "speed": speed,
        "effects": demo.effects,
    }


def _compared(table: Table, name: str, dense: float, reduced: float, form: str, *, change: bool = True) -> None:
    difference = f"{reduced / dense - 1:+.1%}" if change else ""
    table.add_row(name, form.format(dense), form.format(reduced), difference)


def demo_tables(record: dict[str, Any]) -> tuple[Table, Table]:
    """Dense beside reduced, and what the repair changed."""
    table = Table("", "dense", "reduced", "change")
    dense, reduced = record["models"]["dense"], record["models"]["reduced"]
    _compared(table, "parameters", dense["parameters"], reduced["parameters"], "{:,}")
    _compared(table, "MACs per image", dense["macs"], reduced["macs"], "{:,}")
    _compared(table, "accuracy, held out", dense["accuracy"], reduced["accuracy"], "{:.1%}", change=False)
    _compared(table, "top-1 agreement", dense["agreement"], reduced["agreement"], "{:.1%}", change=False)
    for row in record["speed"]:
        for key, words, form in (
            ("p50_ms", "p50, batch {} (ms)", "{:.2f}"),
            ("images_per_s", "images/s, batch {}", "{:,.0f}"),
        ):
            if row["dense"][key] is not None and row["reduced"][key] is not None:
                _compared(table, words.format(row["batch"]), row["dense"][key], row["reduced"][key], form)
            else:
                table.add_row(words.format(row["batch"]), row["dense"]["status"], row["reduced"]["status"], "")
    repair = Table("same widths", "relative logit error", "agreement", "accuracy")
    for effect in record["effects"]:
        figures = f"{effect['relative_error']:.4f}", f"{effect['agreement']:.1%}", f"{effect['accuracy']:.1%}"
        repair.add_row(EFFECTS[effect["preset"]], *figures)
    return table, repair
