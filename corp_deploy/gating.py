"""The gate on files: evidence read, a baseline settled, verdicts written."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from perf.compare import Comparison
from perf.evidence import Evidence
from perf.gate import Gate, judge
from perf.rule import Rule
from perf.runs import load_bench
from perf.summary import summarise
from perf.verdicts import junit_from_gate, markdown_from_gate, save_gate, tracked_from_summary

from .errors import BadInput
from .files import read_json, replacing, write_text


def evidence_of_files(paths: Sequence[Path]) -> Evidence:
    """At most one bench and one parity record, told apart by their kind. Raises BadInput for anything else."""
    found: dict[str, Path] = {}
    for path in paths:
        kind = _kind(path)
        if kind in found:
            raise BadInput(f"{path}: a second {kind} record beside {found[kind]}; give one of each kind")
        found[kind] = path
    return Evidence(
        bench=load_bench(found["bench"]) if "bench" in found else None,
        parity=read_json(found["parity"], kind="parity") if "parity" in found else None,
    )


def _kind(path: Path) -> str:
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("kind")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected bench.json or parity.json") from None
    except (OSError, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: can't be read as a record ({error})") from None
    if kind not in ("bench", "parity"):
        raise BadInput(f"{path}: a record of kind {kind!r}, expected bench or parity")
    return str(kind)


def settle_baseline(
    rules: Sequence[Rule], now: Evidence, records: Sequence[Path], baseline: Path | None, *, init: bool
) -> Evidence | None:
    """The older record, made from this one when asked for. Raises BadInput when a rule needs one and there is none."""
    if baseline is None:
        if init:
            raise BadInput("--init-baseline needs --baseline FILE, which is where the baseline goes")
        return None
    if baseline.is_file():
        return Evidence(bench=load_bench(baseline))
    if not init:
        raise BadInput(
            f"{baseline}: no such baseline; give an older bench.json, or --init-baseline to start with this one"
        )
    if now.bench is None:
        raise BadInput("--init-baseline needs a bench.json among the records")
    source = next(path for path in records if _kind(path) == "bench")
    with replacing(baseline) as temporary:
        shutil.copyfile(source, temporary)
    return Evidence(bench=load_bench(baseline))


def judged(rules: Sequence[Rule], now: Evidence, older: Evidence | None) -> Gate:
    """Every rule's verdict."""
    return judge(rules, now, older)


def gate_as_json(gate: Gate) -> str:
    """The gate's record as text."""
    return json.dumps({"verdict": gate.verdict, "exit_code": gate.exit_code, "rules": [asdict(r) for r in gate.rules]})


def gate_table(gate: Gate) -> Table:
    """One row a rule."""
    table = Table("fails if", "verdict", "why")
    for rule in gate.rules:
        table.add_row(rule.rule, rule.verdict, rule.message)
    return table


def write_gate(gate: Gate, path: Path) -> None:
    """gate.json, Markdown or JUnit, by suffix."""
    if path.suffix == ".json":
        with replacing(path) as temporary:
            save_gate(gate, temporary)
    else:
        write_text(path, markdown_from_gate(gate) if path.suffix == ".md" else junit_from_gate(gate))


def write_tracking(now: Evidence, directory: Path) -> None:
    """The two files that benchmark-tracking actions read. Raises BadInput without a bench record."""
    if now.bench is None:
        raise BadInput("--track writes timings; give a bench.json among the records")
    summary = summarise(now.bench)
    write_text(directory / "smaller-is-better.json", tracked_from_summary(summary, "smaller"))
    write_text(directory / "bigger-is-better.json", tracked_from_summary(summary, "bigger"))


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """Differences and rows as JSON values; latencies as value, low, high."""
    return {
        "comparable": comparison.comparable,
        "differences": [asdict(difference) for difference in comparison.differences],
        "rows": [
            {
                "batch": row.batch,
                "subject": row.subject,
                "ratio": None if row.ratio is None else [row.ratio.value, row.ratio.low, row.ratio.high],
                "change": row.change,
            }
            for row in comparison.rows
        ],
    }
