"""Results gathered for a report: the records of a directory, and the reduction in a reduced model's config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from corp_deploy.reduction.report import SiteReport
from corp_deploy.spec.merging import MergingRecord
from corp_deploy.store.class_names import CLASS_NAMES
from corp_deploy.store.hub_snapshot import ORIGIN
from corp_deploy.store.manifest import efforts_below, load_manifest, rows_of_efforts
from corp_deploy.store.model_config import CONFIG, FITTED, ModelConfig, load_model_config
from ground.errors import BadInput
from ground.records import json_from_record, record_from_file, record_from_value
from perf.parity.logits import LogitMeasures
from perf.parity.parity import Parity, load_parity
from perf.record.runs import Bench, load_bench
from perf.report.content import BudgetLine, EffectLine


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

    rows: tuple[EffectLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """The part of a calibration-size record that a report shows."""

    sentence: str
    points: tuple[dict[str, Any], ...]


def _optional(path: Path, load: Callable[[Path], Record]) -> Record | None:
    return load(path) if path.is_file() else None


def read_record_json(path: Path, kind: str) -> dict[str, Any]:
    return record_from_file(path, dict[str, Any], kind=kind)


def _json_of_part(path: Path, part: type[Any], kind: str, commands: str) -> Any:
    """Read the fields of `part` from a record as JSON values, None if there is no file; `commands` make the record."""
    if not path.is_file():
        return None
    return json_from_record(record_from_file(path, part, kind=kind, remedy=f"make the record again with {commands}"))


def _site_line(site: SiteReport) -> dict[str, Any]:
    energy = site.energy or 1.0
    held_out, loop = site.held_out, site.loop
    return {
        "site": f"{site.site}.{site.part}" if site.part != "mlp" else site.site,
        "width_dense": str(site.width_dense),
        "width_reduced": f"{site.width} (asked {site.width_asked:g})",
        "error_uncompensated": site.error_uncompensated / energy,
        "error": site.error / energy,
        "error_held_out": held_out and held_out.error / (held_out.energy or 1.0),
        "stream_error": loop and loop.error / (loop.energy or 1.0),
        "stream_error_held_out": loop and loop.error_held_out / (loop.energy or 1.0),
    }


def _models(bench: Bench | None, parity: Parity | None) -> list[dict[str, Any]]:
    if bench is None:
        return []
    accuracies = [row.accuracy for row in parity.accuracy] if parity else []
    reduced = next((link.measures for link in parity.links if link.kind == "reduced"), None) if parity else None
    agreement = reduced.top1_agreement if isinstance(reduced, LogitMeasures) else None
    models = (
        {"accuracy": accuracies[0] if accuracies else None},
        {"accuracy": accuracies[1] if len(accuracies) > 1 else None, "agreement": agreement},
    )
    return [
        {
            "name": subject.name,
            "params": subject.params,
            "macs": subject.macs,
            "size_bytes": subject.size_bytes,
            "device_memory_bytes": max((subject.device_memory or {}).values(), default=None),
            **facts,
        }
        for subject, facts in zip(bench.subjects, models, strict=True)
    ]


def shown_lineage(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a model's lineage that a report shows: all but its reduction and other long ones."""
    left_out = ("reduction", "command", FITTED, CLASS_NAMES)
    lineage = {key: value for key, value in config.lineage.items() if key not in left_out}
    if isinstance(source := lineage.get("source"), dict):
        lineage["source"] = {key: value for key, value in source.items() if key != ORIGIN}
    return lineage


def gather_report(directory: Path, title: str | None = None) -> dict[str, Any]:
    """Return all that a report may show of a directory, by entry; raise BadInput without a bench or parity record."""
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
    merging = reduction.merging
    manifest = load_manifest(directory) if (directory / "manifest.json").is_file() else None
    # A report can't contain its own digest.
    every = {} if manifest is None else manifest.files
    files = {name: entry for name, entry in every.items() if not entry.made_by.startswith(REPORTS)}
    lineage = shown_lineage(reduced) if reduced else {}
    effects = _json_of_part(directory / "effects.json", _Effects, EFFECTS_KIND, "`corp-deploy demo`")
    if manifest is not None:
        lineage |= {"versions": manifest.versions, "files": {name: entry.sha256 for name, entry in files.items()}}
    return {
        "title": title or f"{directory.resolve().name}: dense against reduced",
        "bench": bench and read_record_json(directory / "bench.json", "bench"),
        "parity": parity and read_record_json(directory / "parity.json", "parity"),
        "gate": _optional(directory / "gate.json", lambda path: read_record_json(path, "gate")),
        "history": _optional(directory / "history.json", lambda path: read_record_json(path, "history")),
        "calibration_size": _json_of_part(directory / SIZE_FILE, _Size, SIZE_KIND, "`corp-deploy sweep` or `release`"),
        "sites": [_site_line(site) for site in reduction.sites],
        "coverage": reduction.coverage and reduction.coverage.verdict,
        "models": _models(bench, parity),
        "ways": json_from_record(reduction.ways),
        "merging": merging and {"verb": merging.verb, "sentences": merging.sentences(), "blocks": merging.rows},
        "effort": rows_of_efforts(efforts_below(directory)),
        "effects": effects["rows"] if effects else [],
        "lineage": lineage,
        "commands": list(dict.fromkeys(entry.made_by for entry in files.values() if entry.made_by)),
    }
