"""OpenMetrics: a text file with the figures that a release promises, which a dashboard compares with served ones.

It keeps to types that Prometheus' text format has too, since node_exporter's textfile collector reads only that one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from corp_deploy.store.manifest import MANIFEST, load_manifest
from ground.errors import BadInput
from perf.gate.evidence import Evidence
from perf.gate.gate import Gate, Verdict
from perf.record.runs import Bench
from perf.stats.summary import summarise

from .figures import Measure, figures_of

# The name of each family without its unit, its unit, the factor to the unit, and its help.
FAMILIES: dict[Measure, tuple[str, str, float, str]] = {
    "p50": ("promised_p50", "seconds", 1e-3, "Median time of a batch as bench measured it."),
    "throughput": ("promised_throughput", "images_per_second", 1.0, "Images per second as bench measured them."),
    "joules per image": ("promised_energy_per_image", "joules", 1.0, "Energy of an image beyond the idle machine's."),
    "size": ("size", "bytes", 1.0, "Bytes of the model's file."),
    "agreement": ("agreement", "ratio", 1.0, "Share of inputs on which the model agrees with the dense model."),
}
IDLE = ("corp_deploy_idle_power_watts", "Power of the idle machine, which the energy of an image leaves out.", "watts")
VERDICT = "corp_deploy_gate_verdict"
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def openmetrics_from_records(
    now: Evidence, gate: Gate, directory: Path, *, name: str | None = None, version: int | None = None
) -> str:
    """Return the candidate's figures and the gate's verdict as gauges in base units.

    The labels `model` and `version` are `name` and `version`, or else those of the release in `directory`.
    """
    if now.bench is None:
        raise BadInput("--metrics writes timings; give a bench.json among the records")
    labels, candidate, lines = _labels(now.bench, directory), now.bench.candidate.name, list[str]()
    labels |= {label: word for label, word in (("model", name), ("version", version)) if word is not None}
    figures = [each for each in figures_of(now) if each.measure == "agreement" or each.subject == candidate]
    for measure, (stem, unit, factor, help_text) in FAMILIES.items():
        family = f"corp_deploy_{stem}_{unit}"
        rows = [each for each in figures if each.measure == measure]
        lines += [*_head(family, help_text, unit)] if rows else []
        for each in rows:
            own = {"batch": each.batch, "output": each.output}
            lines.append(_sample(family, {**labels, **own}, each.value * factor))
    idle_w = {row.batch: row.energy.idle_w for row in summarise(now.bench).rows if row.energy is not None}
    lines += _head(*IDLE) if idle_w else []
    lines += [_sample(IDLE[0], {**labels, "batch": batch}, watts) for batch, watts in idle_w.items()]
    lines += _head(VERDICT, "The gate's verdict: 1 at the verdict that holds, 0 at the others.")
    lines += [_sample(VERDICT, {**labels, "verdict": each}, float(each == gate.verdict)) for each in get_args(Verdict)]
    return "\n".join((*lines, "# EOF\n"))


def _labels(bench: Bench, directory: Path) -> dict[str, object]:
    release = load_manifest(directory / MANIFEST).release if (directory / MANIFEST).is_file() else None
    described, here = bench.candidate.describe, bench.environment
    device = here.get("cpu") if described.get("device") == "cpu" else here.get("gpu")
    return {
        "model": bench.candidate.name if release is None else release.name,
        "version": None if release is None else release.version,
        "precision": described.get("precision") or described.get("computed_in"),
        "device": device or described.get("device"),
    }


def _head(name: str, help_text: str, unit: str = "") -> Iterator[str]:
    yield f"# TYPE {name} gauge"
    yield from [f"# UNIT {name} {unit}"] if unit else []
    yield f"# HELP {name} {help_text}"


def _sample(name: str, labels: Mapping[str, object], value: float) -> str:
    texts = {label: str(text).translate(ESCAPED) for label, text in labels.items() if text is not None}
    listed = ",".join(f'{label}="{text}"' for label, text in texts.items())
    return f"{name}{{{listed}}} {value!r}"
