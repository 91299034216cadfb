"""Results gathered for a report: the records of a directory, and the reduction in a reduced model's config.json."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from corp_deploy.reduction.report import SiteReport
from corp_deploy.spec.merging import MergingRecord
from corp_deploy.store.class_names import CLASS_NAMES
from corp_deploy.store.hub_snapshot import ORIGIN
from corp_deploy.store.manifest import FILES, MANIFEST, Efforts, efforts_below, load_manifest
from corp_deploy.store.model_config import CONFIG, FITTED, ModelConfig, load_model_config
from ground.effort import Effort
from ground.errors import BadInput
from ground.records import record_from_file, record_from_value
from perf.gate.history import load_trend
from perf.parity.logits import LogitMeasures
from perf.parity.parity import Parity, load_parity
from perf.record.runs import Bench, load_bench
from perf.report.content import (
    BudgetLine,
    Content,
    EffectLine,
    EffortLine,
    GateLines,
    ImagesLines,
    MergingLines,
    ModelLine,
    SiteLine,
)


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """The coverage in words, and the reason for each refused site by name."""

    verdict: str
    refused: dict[str, str] = {}


class ReductionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The report of every site, the alternatives of a budget, the decisions in words, the coverage and the merging."""

    sites: tuple[SiteReport, ...] = ()
    ways: tuple[BudgetLine, ...] = ()
    decided: tuple[str, ...] = ()
    coverage: Covered | None = None
    merging: MergingRecord | None = None


def read_reduction(config: ModelConfig, directory: Path) -> ReductionRecord:
    """Read the record of the reduction, empty for a model that was never reduced."""
    where = f"{directory / CONFIG}: lineage.reduction"
    return record_from_value(config.lineage.get("reduction", {}), ReductionRecord, where=where)


EFFECTS_KIND = "corp-deploy/effects"
SIZE_KIND, SIZE_FILE = "corp-deploy/calibration-size", "calibration-size.json"
REPORTS = "corp-deploy report "
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effects:
    """The part of a record of effects that a report shows."""

    rows: tuple[EffectLine, ...] = ()


def _optional(path: Path, load: Callable[[Path], Record]) -> Record | None:
    return load(path) if path.is_file() else None


def _part_of(path: Path, part: type[Record], kind: str, commands: str) -> Record | None:
    """Read the fields of `part` from a record, None if there is no file; `commands` make the record."""
    remedy = f"make the record again with {commands}"
    return _optional(path, lambda path: record_from_file(path, part, kind=kind, remedy=remedy))


def _site_line(site: SiteReport) -> SiteLine:
    energy, held_out, loop = site.energy or 1.0, site.held_out, site.loop
    return SiteLine(
        site=f"{site.site}.{site.part}" if site.part != "mlp" else site.site,
        width_dense=str(site.width_dense),
        width_reduced=f"{site.width} (asked {site.width_asked:g})",
        error_uncompensated=site.error_uncompensated / energy,
        error=site.error / energy,
        error_held_out=None if held_out is None else held_out.error / (held_out.energy or 1.0),
        stream_error=None if loop is None else loop.error / (loop.energy or 1.0),
        stream_error_held_out=None if loop is None else loop.error_held_out / (loop.energy or 1.0),
    )


def _model_lines(bench: Bench | None, parity: Parity | None) -> Iterator[ModelLine]:
    if bench is None:
        return
    accuracies = [row.accuracy for row in parity.accuracy] if parity else []
    reduced = next((link.measures for link in parity.links if link.kind == "reduced"), None) if parity else None
    agreement = reduced.top1_agreement if isinstance(reduced, LogitMeasures) else None
    for place, subject in enumerate(bench.subjects):
        yield ModelLine(
            name=subject.name,
            params=subject.params,
            macs=subject.macs,
            size_bytes=subject.size_bytes,
            device_memory_bytes=max((subject.device_memory or {}).values(), default=None),
            accuracy=accuracies[place] if len(accuracies) > place else None,
            agreement=agreement if place else None,
        )


def _merging_lines(merging: MergingRecord) -> MergingLines:
    return MergingLines(verb=merging.verb, sentences=merging.sentences(), blocks=merging.rows)


def effort_lines(efforts: Efforts) -> tuple[EffortLine, ...]:
    """Return a line for each part of each step, and a last one for the reading and writing of all."""
    lines, of_files = list[EffortLine](), list[Effort]()
    counts = Counter(step for step, _ in efforts)
    for (step, about), record in efforts.items():
        of_what = f" {about}" if counts[step] > 1 or step in ("export", "build") else ""
        if record is None:
            parts = ("select", "recover") if step == "reduce" else (step,)
            lines += (EffortLine(step=f"{part}{of_what}") for part in parts)
            continue
        name = f"{of_what}{', continued' if record.resumed else ''}"
        for part, effort in record.parts.items():
            if part == FILES:
                of_files.append(effort)
            else:
                own = EffortLine(step=f"{part}{name}", **asdict(effort), machine=record.machine, gpu=record.gpu)
                lines.append(own)
    if of_files:  # the sum over all machines, like the steps' own seconds
        peaks: dict[str, Any] = {
            key: max((peak for each in of_files if (peak := getattr(each, key)) is not None), default=None)
            for key in ("peak_bytes", "device_peak_bytes")
        }
        lines.append(EffortLine(step=FILES, seconds=sum(each.seconds for each in of_files), **peaks))
    return tuple(lines)


def shown_lineage(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a model's lineage that a report shows: all but its reduction and other long ones."""
    left_out = ("reduction", "command", FITTED, CLASS_NAMES)
    lineage = {key: value for key, value in config.lineage.items() if key not in left_out}
    if isinstance(source := lineage.get("source"), dict):
        lineage["source"] = {key: value for key, value in source.items() if key != ORIGIN}
    return lineage


def gather_report(directory: Path, title: str | None = None) -> Content:
    """Return all that a report may show of a directory; raise BadInput without a bench or parity record."""
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory, expected one with bench.json or parity.json")
    bench = _optional(directory / "bench.json", load_bench)
    parity = _optional(directory / "parity.json", load_parity)
    if bench is None and parity is None:
        raise BadInput(
            f"{directory}: neither bench.json nor parity.json is here; run `bench` or `verify` with -o into it"
        )
    folder = directory / "reduced"
    reduced = load_model_config(folder) if (folder / CONFIG).is_file() else None
    reduction = read_reduction(reduced, folder) if reduced else ReductionRecord()
    manifest = _optional(directory / MANIFEST, load_manifest)
    # A report can't contain its own digest.
    every = {} if manifest is None else manifest.files
    files = {name: entry for name, entry in every.items() if not entry.made_by.startswith(REPORTS)}
    lineage = shown_lineage(reduced) if reduced else {}
    if manifest is not None:
        lineage |= {"versions": manifest.versions, "files": {name: entry.sha256 for name, entry in files.items()}}
    effects = _part_of(directory / "effects.json", _Effects, EFFECTS_KIND, "`corp-deploy demo`")
    of_size = "`corp-deploy sweep` or `release`"
    return Content(
        title=title or f"{directory.resolve().name}: dense against reduced",
        bench=bench,
        parity=parity,
        gate=_part_of(directory / "gate.json", GateLines, "gate", "`corp-deploy gate`") or GateLines(),
        history=_optional(directory / "history.json", load_trend),
        calibration_size=_part_of(directory / SIZE_FILE, ImagesLines, SIZE_KIND, of_size),
        sites=tuple(map(_site_line, reduction.sites)),
        coverage=reduction.coverage.verdict if reduction.coverage else "",
        models=tuple(_model_lines(bench, parity)),
        ways=reduction.ways,
        merging=None if reduction.merging is None else _merging_lines(reduction.merging),
        effort=effort_lines(efforts_below(directory)),
        effects=effects.rows if effects else (),
        lineage=lineage,
        commands=tuple(dict.fromkeys(entry.made_by for entry in files.values() if entry.made_by)),
    )
