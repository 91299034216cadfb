"""What the demo came to, as figures and as two tables."""

from typing import Any

from rich.table import Table

from corp_deploy.families.counting import macs, parameters
from perf.stats.summary import summarise

from .run import Demo

EFFECTS = {"none": "without repair (none)", "grail": "repaired as GRAIL does (grail)", "best": "repaired (best)"}


def demo_record(demo: Demo) -> dict[str, Any]:
    """The table's figures."""
    links = {link.kind: link for link in demo.parity.links}
    models = {"dense": (demo.dense, 1.0), "reduced": (demo.reduced, links["reduced"].measures.agreement)}
    rows = {
        name: {
            "parameters": parameters(checkpoint.model),
            "macs": macs(checkpoint.model),
            "accuracy": right.accuracy,
            "agreement": agreement,
        }
        for (name, (checkpoint, agreement)), right in zip(models.items(), demo.parity.accuracy[:2], strict=True)
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
    told = {"verdict": demo.parity.verdict, "line": demo.parity.line}
    return told | {"models": rows, "speed": speed, "effects": demo.effects}


def demo_tables(record: dict[str, Any]) -> tuple[Table, Table]:
    """Dense beside reduced, and what the repair changed."""
    table = Table("", "dense", "reduced", "change")

    def compare(name: str, dense: float, reduced: float, form: str, *, change: bool = True) -> None:
        table.add_row(name, f"{dense:{form}}", f"{reduced:{form}}", f"{reduced / dense - 1:+.1%}" if change else "")

    dense, reduced = record["models"]["dense"], record["models"]["reduced"]
    compare("parameters", dense["parameters"], reduced["parameters"], ",")
    compare("MACs per image", dense["macs"], reduced["macs"], ",")
    compare("accuracy, held out", dense["accuracy"], reduced["accuracy"], ".1%", change=False)
    compare("top-1 agreement", dense["agreement"], reduced["agreement"], ".1%", change=False)
    for row in record["speed"]:
        one, other, batch = row["dense"], row["reduced"], row["batch"]
        for key, name, form in (
            ("p50_ms", f"p50, batch {batch} (ms)", ".2f"),
            ("images_per_s", f"images/s, batch {batch}", ",.0f"),
        ):
            if one[key] is not None and other[key] is not None:
                compare(name, one[key], other[key], form)
            else:
                table.add_row(name, one["status"], other["status"], "")
    repair = Table("same widths", "relative logit error", "agreement", "accuracy")
    for effect in record["effects"]:
        figures = f"{effect['relative_error']:.4f}", f"{effect['agreement']:.1%}", f"{effect['accuracy']:.1%}"
        repair.add_row(EFFECTS[effect["preset"]], *figures)
    return table, repair
