"""Of which numbers a program's whole inputs are: rows of the tables that they are looked up in."""

from torch import Tensor, fx

from .program import Program, operation

_SAME = ("_to_copy", "alias", "clone", "contiguous", "expand", "reshape", "slice", "squeeze", "to", "unsqueeze", "view")
"""What gives the numbers that it is given."""


def vocabularies(program: Program) -> dict[str, int]:
    """By the name of an input how many rows the smallest table has that its numbers are looked up in."""
    rows: dict[str, int] = {}
    for node in program.nodes:
        if operation(node) != "embedding":
            continue
        table, source = node.args[:2]
        assert isinstance(table, fx.Node), node
        while isinstance(source, fx.Node) and operation(source).rstrip("_") in _SAME:
            source = source.args[0]
        value = table.meta.get("val")
        if isinstance(source, fx.Node) and source.op == "placeholder" and isinstance(value, Tensor):
            rows[str(source.target)] = min(len(value), rows.get(str(source.target), len(value)))
    return rows
