"""What it took to make what a report is about, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

from .numbers import Table, number, size

MEASURES = ("seconds", "peak_bytes", "device_peak_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortLine:
    """One step: what nobody wrote down is None. Bytes are the highest resident in the process, and of tensors on the
    GPU; `machine` is the processor's name, empty where a line is of several.
    """

    step: str
    seconds: float | None = None
    peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    machine: str = ""
    gpu: str | None = None


def effort_table(lines: Sequence[EffortLine]) -> Table:
    """A row a step and one of all together, where every step is known; the machines in a note, or in a column where
    there are several.
    """
    machines = list(dict.fromkeys(_machine(line) for line in lines if line.machine))
    several = len(machines) > 1
    rows = [
        (
            line.step,
            "not recorded" if line.seconds is None else number(line.seconds),
            size(line.peak_bytes),
            size(line.device_peak_bytes),
            *[_machine(line)] * several,
        )
        for line in lines
    ]
    measured_s = [line.seconds for line in lines if line.seconds is not None]
    if len(measured_s) == len(lines) > 1:
        peaks = [max((each for line in lines if (each := getattr(line, name))), default=None) for name in MEASURES[1:]]
        rows.append(("all together", number(sum(measured_s)), *map(size, peaks), *[""] * several))
    note = "" if several or not machines else f"On {machines[0]}. "
    note += "Each step as it took when its files were made: one that was not run again keeps the older figures. "
    note += "Memory is all that the process held, and of the GPU's what torch did."
    columns = ("Step", "Seconds", "Peak memory", "Peak on the GPU", *["Machine"] * several)
    return Table(key="effort", title="What it took", columns=columns, rows=tuple(rows), note=note if rows else "")


def _machine(line: EffortLine) -> str:
    return f"{line.machine}, {line.gpu}" if line.gpu else line.machine
