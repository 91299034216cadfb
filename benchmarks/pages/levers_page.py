"""The table of options by kind of site."""

import re
from collections.abc import Sequence

from benchmarks.pages.markdown import Row, cross_table, paragraphs

_PARAMETER = re.compile(r"`(\w+)=([^`]*)`")
_REMEDY = re.compile(r"; (leave it (?:away|out)|it affects .*|give .*|reduce without .*)$")


def levers(record: Row) -> str:
    """Return a table with a row for each option and a column for each kind of site.

    An option that does nothing has the number of its reason.
    """
    reasons = list(dict.fromkeys(_reason(row) for row in record["rows"] if "reason" in row))
    text = (
        "Each option on each kind of site, on a small model with structured random weights. Half of the sites of that "
        "kind are removed; budgets remove a fifth of the whole model, `--latency` a tenth. The table shows the error "
        "of the outputs on other inputs; for a precision, the error of its graph against the reduced model. A number "
        "in brackets refers to the message that refuses the option, listed below the table:"
    )
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    first = {"option": "{lever}"}
    return paragraphs(text, cross_table(record["rows"], first, "{kind}", lambda row: _cell(row, reasons)), listed)


def _reason(row: Row) -> str:
    """Return the reason on one line, with options as commands spell them and without the remedy."""
    return _PARAMETER.sub(_option, _REMEDY.sub("", " ".join(row["reason"].split())))


def _option(parameter: re.Match[str]) -> str:
    name, value = parameter[1].replace("_", "-"), parameter[2].strip("'")
    return f"--{name}" if value == "True" else f"--{name} {value}"


def _cell(row: Row, reasons: Sequence[str]) -> str:
    return f"{row['error']:.2g}" if "error" in row else f"[{reasons.index(_reason(row)) + 1}]"
