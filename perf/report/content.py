"""What a report shows: the records of one release and what is known beside them, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ground.errors import BadInput
from ground.files import whole
from ground.text import printable
from perf.parity.parity import Parity, parity_from_json
from perf.record.rows import row_from_json
from perf.record.runs import Bench, bench_from_json
from perf.stats.summary import Summary, summarise

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLine:
    """One site: its widths and the relative error of its output without and with the compensation.

    `error_held_out` is the compensated one on images that the compensation was not fitted to. The stream's errors are
    what the residual stream lacks after the site, where the compensation aimed at the stream.
    """

    site: str
    width_dense: str
    width_reduced: str
    error_uncompensated: float | None
    error: float | None
    error_held_out: float | None = None
    stream_error: float | None = None
    stream_error_held_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """One model; what is not known is None. Agreement is with the dense model."""

    name: str
    params: int | None = None
    macs: int | None = None
    size_bytes: int | None = None
    accuracy: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectLine:
    """What one preset gives at the same widths."""

    preset: str
    relative_error: float | None = None
    agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WayLine:
    """One way to spend the same budget: the share of the dense cost it keeps, its logit error predicted and found."""

    name: str
    share: float
    predicted_error: float
    measured_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLine:
    """One rule as the gate judged it."""

    rule: str
    verdict: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Everything a report may show; parts that were not made are None or empty."""

    title: str
    bench: Bench | None = None
    summary: Summary | None = None
    parity: Parity | None = None
    gate_verdict: str | None = None
    gate: tuple[GateLine, ...] = ()
    sites: tuple[SiteLine, ...] = ()
    coverage: str = ""
    models: tuple[ModelLine, ...] = ()
    effects: tuple[EffectLine, ...] = ()
    ways: tuple[WayLine, ...] = ()
    environment: Mapping[str, str]
    lineage: Mapping[str, str]
    commands: tuple[str, ...] = ()


def content_from_record(record: Mapping[str, Any]) -> Content:
    """`record` has the keys title, bench, parity, gate (records as read from JSON, or None), sites, models, effects,
    ways, environment, lineage (flat mappings), coverage (how many sites were changed, in words) and commands (lines);
    every key but title may be missing.

    Raises BadInput, naming the part, when one of them is no such record.
    """
    if not isinstance(record.get("title"), str):
        raise BadInput("report: the title is missing; give the record a 'title'")
    with whole(f"{record['title'][:100]}: a record of the report"):
        return _content(_printable(record))


def _printable(value: Any) -> Any:
    """The same JSON with every text fit to show, keys among them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value


def _content(record: Mapping[str, Any]) -> Content:
    bench = None if record.get("bench") is None else bench_from_json(record["bench"], where="bench.json")
    gate = record.get("gate") or {}
    return Content(
        title=record["title"],
        bench=bench,
        summary=None if bench is None else summarise(bench),
        parity=None if record.get("parity") is None else parity_from_json(record["parity"], where="parity.json"),
        gate_verdict=gate.get("verdict"),
        gate=_lines(GateLine, gate.get("rules"), "gate.json: rules"),
        sites=tuple(_site(line) for line in record.get("sites") or ()),
        coverage=str(record.get("coverage") or ""),
        models=_lines(ModelLine, record.get("models"), "models"),
        effects=_lines(EffectLine, record.get("effects"), "effects"),
        ways=_lines(WayLine, record.get("ways"), "ways"),
        environment=_flat(record.get("environment") or (bench.environment if bench else {})),
        lineage=_flat(record.get("lineage") or {}),
        commands=tuple(map(str, record.get("commands") or ())),
    )


def _lines(kind: type[Line], rows: object, where: str) -> tuple[Line, ...]:
    if not isinstance(rows, list | tuple | None):
        raise BadInput(f"{where}: got {type(rows).__name__}, expected a list")
    return tuple(row_from_json(kind, row, where=f"{where}[{place}]") for place, row in enumerate(rows or ()))


def _site(line: object) -> SiteLine:
    """Widths may be numbers or words such as `qk 32, v 64`."""
    if isinstance(line, Mapping):
        line = {key: str(value) if key.startswith("width") else value for key, value in line.items()}
    return row_from_json(SiteLine, line, where="sites")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys; what is unknown (None) is left out."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return flat
