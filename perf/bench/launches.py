"""One record of measurements in several fresh processes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from ground.errors import BadInput
from perf.record.energy import EnergyRun
from perf.record.runs import Bench, BenchTrial, Row
from perf.record.states import Block
from perf.stats.stability import find_warnings

_Block = TypeVar("_Block", bound=Block)


def join_launches(launches: Sequence[Bench]) -> Bench:
    """Return the record of all launches of the same subjects, each block with its launch.

    Environment and settings are those of the first launch. Raises BadInput if a subject changed between launches.
    """
    first = launches[0]
    for before, (one, other) in enumerate(pairwise(launches), 1):
        changed = [new.name for old, new in zip(one.subjects, other.subjects, strict=True) if old != new]
        if changed:
            raise BadInput(f"{changed[0]} changed between launches {before} and {before + 1}; measure them again")
    rows = [_join_rows(of_all) for of_all in zip(*(each.rows for each in launches), strict=True)]
    others = [[text for text in each.warnings if text not in find_warnings(each.rows)] for each in launches]
    return replace(
        first,
        settings={**first.settings, "launches": len(launches)},
        rows=tuple(rows),
        warnings=(*_join_texts(others), *find_warnings(rows)),
    )


def _join_rows(rows: Sequence[Row]) -> Row:
    """Return the row of all launches, or that of the first one in which a subject was not measured."""
    for launch, row in enumerate(rows, 1):
        if any(trial.status != "ok" for trial in row.trials.values()):
            return replace(row, trials={name: _name_launch(trial, launch) for name, trial in row.trials.items()})
    first = rows[0]
    audits = dict.fromkeys(name for row in rows for name in row.repeat_blocks)
    return replace(
        first,
        trials={name: _join_trials([row.trials[name] for row in rows]) for name in first.trials},
        stop=", ".join(dict.fromkeys(row.stop for row in rows)),
        blocks=_join_blocks([row.blocks for row in rows]),
        noise_blocks=_join_blocks([row.noise_blocks for row in rows]),
        repeat_blocks={name: _join_blocks([row.repeat_blocks.get(name, ()) for row in rows]) for name in audits},
        left_out=tuple(_join_texts([row.left_out for row in rows])),
        energy=_join_energy([row.energy for row in rows]),
    )


def _name_launch(trial: BenchTrial, launch: int) -> BenchTrial:
    return trial if trial.message is None else replace(trial, message=f"launch {launch}: {trial.message}")


def _join_trials(trials: Sequence[BenchTrial]) -> BenchTrial:
    """Return the first trial, with the largest peak of memory of all."""
    peaks = [each.peak_memory_bytes for each in trials if each.peak_memory_bytes is not None]
    flat = all(each.warm_up_flat for each in trials)
    return replace(trials[0], warm_up_flat=flat, peak_memory_bytes=max(peaks, default=None))


def _join_energy(runs: Sequence[EnergyRun | None]) -> EnergyRun | None:
    measured = [run for run in runs if run is not None]
    if not measured:
        return None
    idle, blocks = ([() if run is None else getattr(run, part) for run in runs] for part in ("idle", "blocks"))
    return replace(measured[0], idle=_join_blocks(idle), blocks=_join_blocks(blocks))


def _join_blocks(launches: Sequence[Sequence[_Block]]) -> tuple[_Block, ...]:
    joined: list[_Block] = []
    for launch, blocks in enumerate(launches):
        before = 1 + max((block.round for block in joined), default=-1)
        joined += [replace(block, launch=launch, round=before + block.round) for block in blocks]
    return tuple(joined)


def _join_texts(launches: Sequence[Iterable[str]]) -> Iterator[str]:
    """Yield the texts of all launches once, and the others with the number of their launch."""
    of_all = set.intersection(*(set(texts) for texts in launches))
    for launch, texts in enumerate(launches):
        for text in texts:
            if text not in of_all:
                yield f"launch {launch + 1}: {text}"
            elif launch == 0:
                yield text
