"""How many layers a builder says that it has sparse kernels for, and for which it took them."""

import re
from dataclasses import dataclass

_LINES = {
    "eligible": re.compile(
        r"\(Sparsity\) (?:Layers eligible for sparse math|"
        r"Found (?P<count>\d+) layer\(s\) eligible to use sparse tactics):?(?P<names>.*)"
    ),
    "picked": re.compile(
        r"\(Sparsity\) (?:TRT inference plan picked sparse implementation for layers|"
        r"Chose (?P<count>\d+) layer\(s\) using sparse tactics):?(?P<names>.*)"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayers:
    """Layers that the builder could run sparse and those that it does, None where it says nothing; the latter's names
    where it tells them.
    """

    eligible: int | None
    selected: int | None
    names: tuple[str, ...]


def sparse_layers_from_log(text: str) -> SparseLayers:
    """From a builder's lines, as TensorRT 8 (names alone) and later ones (counts) have them.

    They come once for each time that it chooses kernels; the last ones are of the engine.
    """
    (eligible, _), (selected, names) = (_layers_of_line(line, text) for line in _LINES.values())
    return SparseLayers(eligible=eligible, selected=selected, names=names)


def _layers_of_line(line: re.Pattern[str], text: str) -> tuple[int | None, tuple[str, ...]]:
    *_, last = [None, *line.finditer(text)]
    if last is None:
        return None, ()
    names = tuple(name for part in last["names"].split(", ") if (name := part.strip()))
    return len(names) if last["count"] is None else int(last["count"]), names
