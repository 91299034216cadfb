"""Tables of Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def interval(value: Sequence[float | None] | None, digits: int = 2) -> str:
    """A figure with the ends of its interval, without those where there were too few rounds for them."""
    if value is None or value[0] is None:
        return "-"
    middle, low, high = (None if each is None else f"{each:,.{digits}f}" for each in value)
    return f"{middle}" if low is None or high is None else f"{middle} ({low} to {high})"
