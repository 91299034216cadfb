"""What the stages of a release took, kept beside their stamps: never digested, so a second run changes nothing.

A stage that is not run again keeps the record of the run that made its files, with the machine it ran on. Imports no
torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from ground.effort import Effort, Stopwatch
from ground.files import write_json
from ground.records import record_from_file
from ground.text import markdown_line
from perf.timing.environment import cpu_name

from .incremental import STATE, Stage, StageDirs

SUFFIX = ".effort"
TIMED = ("moments", "reduce", "export", "engine")
NAMES = {"moments": "calibrate", "engine": "build"}


class StageEffort(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="corp-deploy/effort"):
    """What one stage took when it was last run; `machine` is the processor's name."""

    version: Literal[1] = 1
    stage: str
    machine: str
    effort: Effort


def _path(root: Path, stage: str) -> Path:
    return root / STATE / f"{stage}{SUFFIX}"


def timed(stage: Stage, watch_of: Callable[[], Stopwatch], *, machine: Callable[[], str] = cpu_name) -> Stage:
    """The stage with what it takes written down when it ends well; one that fails keeps the older record."""

    def run(dirs: StageDirs) -> None:
        watch = watch_of()
        with watch.of(stage.name):
            stage.run(dirs)
        record = StageEffort(stage=stage.name, machine=machine(), effort=watch.efforts[stage.name])
        write_json(_path(dirs.root, stage.name), msgspec.to_builtins(record))

    return replace(stage, run=run) if stage.name.partition(".")[0] in TIMED else stage


def efforts_of(root: Path, stages: Sequence[str]) -> dict[str, StageEffort | None]:
    """By stage, of those that are timed; None where nothing was written down. Raises BadInput for a damaged record."""
    names = [name for name in stages if name.partition(".")[0] in TIMED]
    return {
        name: record_from_file(_path(root, name), StageEffort) if _path(root, name).is_file() else None
        for name in names
    }


def _shown(stage: str) -> str:
    first, dot, rest = stage.partition(".")
    return f"{NAMES.get(first, first)}{f' {rest}' if dot else ''}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f}"


def effort_lines(efforts: Mapping[str, StageEffort | None]) -> Iterator[str]:
    """A Markdown table: seconds and peaks by step, the total where every step is known."""
    yield "| step | seconds | peak memory (MiB) | peak on the GPU (MiB) | machine |"
    yield "|---|---|---|---|---|"
    for stage, known in efforts.items():
        if known is None:
            yield f"| {_shown(stage)} | not recorded | - | - | - |"
            continue
        each = known.effort
        peaks = f"{_mib(each.peak_bytes)} | {_mib(each.device_peak_bytes)}"
        yield f"| {_shown(stage)} | {each.seconds:,.1f} | {peaks} | {markdown_line(known.machine)} |"
    every = [known for known in efforts.values() if known is not None]
    if every and len(every) == len(efforts):
        host = max((each.effort.peak_bytes for each in every if each.effort.peak_bytes is not None), default=None)
        device = [each.effort.device_peak_bytes for each in every if each.effort.device_peak_bytes is not None]
        total = f"{sum(each.effort.seconds for each in every):,.1f}"
        yield f"| total | {total} | {_mib(host)} | {_mib(max(device, default=None))} | |"
    yield ""
    yield "Each step as it took when its files were made: one that was not run again keeps the older figures."
