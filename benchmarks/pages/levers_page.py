"""The table of levers and kinds of sites."""

import re
from typing import Any

from benchmarks.pages.markdown import table

_REMEDY = re.compile(r"; (leave it (?:away|out)|it is honoured by .*|give .*|reduce without .*)$")


def levers(record: dict[str, Any]) -> str:
    """A line a lever, a column a kind; what did nothing has the number of its reason."""
    cells = {(row["lever"], row["kind"]): row for row in record["rows"]}
    kinds, every = (list(dict.fromkeys(row[of] for row in record["rows"])) for of in ("kind", "lever"))
    reasons = list(dict.fromkeys(_reason(row) for row in record["rows"] if "reason" in row))
    lines = [[lever, *(_cell(cells[lever, kind], reasons) for kind in kinds)] for lever in every]
    text = (
        "Every lever on every kind of site, each on a small model with random weights of some structure, half of the "
        "sites of that kind removed (budgets: a fifth of the whole model, of latency a tenth, of this kind among "
        "others): the error of the outputs on other inputs, of a precision that of its graph beside the reduced model. "
        "A number in brackets is the tool's reason why a lever does nothing there:"
    )
    said = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return "\n\n".join([text, table(["", *kinds], lines), said])


def _reason(row: dict[str, Any]) -> str:
    return _REMEDY.sub("", row["reason"])


def _cell(row: dict[str, Any], reasons: list[str]) -> str:
    return f"{row['error']:.2g}" if "error" in row else f"[{reasons.index(_reason(row)) + 1}]"
