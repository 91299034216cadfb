"""The table of options by kind of site."""

import re
from typing import Any

from benchmarks.pages.markdown import table

_PARAMETER = re.compile(r"`(\w+)=([^`]*)`")
_REMEDY = re.compile(r"; (leave it (?:away|out)|it affects .*|give .*|reduce without .*)$")


def levers(record: dict[str, Any]) -> str:
    """Return a table with a row for each option and a column for each kind of site.

    An option that does nothing has the number of its reason.
    """
    cells = {(row["lever"], row["kind"]): row for row in record["rows"]}
    kinds, every = (list(dict.fromkeys(row[of] for row in record["rows"])) for of in ("kind", "lever"))
    reasons = list(dict.fromkeys(_reason(row) for row in record["rows"] if "reason" in row))
    lines = [[lever, *(_cell(cells[lever, kind], reasons) for kind in kinds)] for lever in every]
    text = (
        "Each option on each kind of site, on a small model with structured random weights. Half of the sites of that "
        "kind are removed; budgets remove a fifth of the whole model, `--latency` a tenth. The table shows the error "
        "of the outputs on other inputs; for a precision, the error of its graph against the reduced model. A number "
        "in brackets refers to the message that refuses the option, listed below the table:"
    )
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return "\n\n".join([text, table(["option", *kinds], lines), listed])


def _reason(row: dict[str, Any]) -> str:
    """Return the reason on one line, with options as commands spell them and without the remedy."""
    return _PARAMETER.sub(_option, _REMEDY.sub("", " ".join(row["reason"].split())))


def _option(parameter: re.Match[str]) -> str:
    name, value = parameter[1].replace("_", "-"), parameter[2].strip("'")
    return f"--{name}" if value == "True" else f"--{name} {value}"


def _cell(row: dict[str, Any], reasons: list[str]) -> str:
    return f"{row['error']:.2g}" if "error" in row else f"[{reasons.index(_reason(row)) + 1}]"
