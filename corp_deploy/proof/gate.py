"""The gate on files: reads records, judges them beside older ones, and writes verdicts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ground.errors import BadInput
from ground.files import write_text
from ground.records import Head, record_from_file
from perf.gate.evidence import Evidence
from perf.gate.gate import PARITY, Gate, JudgedRule, Verdict, judge
from perf.gate.history import save_trend
from perf.gate.parity_figures import find_judged_outputs
from perf.gate.rule import FITTED, Rule, rule_from_text
from perf.gate.verdicts import junit_from_gate, markdown_from_gate, save_gate
from perf.parity.parity import HOW_TO_JUDGE, load_parity
from perf.record.runs import load_bench
from perf.report.history import draw_history
from perf.stats.compare import Comparison
from perf.stats.releases import load_history, release_of_file
from perf.stats.stats import DEFAULT_CONFIDENCE
from perf.stats.trend import Trend, build_trend

TREND, PLOT = "history.json", "history.svg"


def read_trend(bench: Path, directory: Path) -> Trend:
    return build_trend(load_history(directory), release_of_file(bench))


def write_trend(trend: Trend, directory: Path) -> None:
    """Write history.json, which `report` shows, and history.svg."""
    save_trend(trend, directory / TREND)
    write_text(directory / PLOT, draw_history(trend).standalone)


def sort_records(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the paths of at most one bench and one parity record by kind; raise BadInput for other files."""
    by_kind: dict[str, Path] = {}
    for path in paths:
        kind = str(record_from_file(path, Head).kind)
        if kind not in ("bench", "parity"):
            raise BadInput(f"{path}: a record of kind {kind[:100]!r}, expected bench or parity")
        if kind in by_kind:
            raise BadInput(f"{path}: a second {kind} record beside {by_kind[kind]}; give one of each kind")
        by_kind[kind] = path
    return by_kind


def read_evidence(bench: Path | None, parity: Path | None, confidence: float = DEFAULT_CONFIDENCE) -> Evidence:
    """Read the records; `confidence` is that of the intervals computed from them."""
    return Evidence(
        bench=None if bench is None else load_bench(bench),
        parity=None if parity is None else load_parity(parity),
        confidence=confidence,
    )


def parity_row(path: Path, rules: Sequence[Rule] = ()) -> JudgedRule:
    """Return the proof's own verdict, by its own confidence, as a row of the gate.

    If the proof itself is UNJUDGED, the row is INCONCLUSIVE when an output is judged by no limit of the proof and no
    rule, and else UNJUDGED: the rules, or a proof on other inputs, judge instead.
    """
    parity = load_parity(path)
    verdict: Verdict = parity.verdict
    message, judged = parity.line, {name for rule in rules for name in find_judged_outputs(rule, parity)}
    if verdict == "UNJUDGED" and parity.unjudged:
        if left := [name for name in parity.unjudged if name not in judged]:
            verdict = "INCONCLUSIVE"
            message += f"; neither a limit of verify nor a rule judges {' and '.join(left)}: {HOW_TO_JUDGE}"
        else:
            message += "; the rules judge instead"
    return JudgedRule(rule=f"parity ({path.name})", verdict=verdict, message=message, metric=PARITY)


def with_fitted_rule(rules: Sequence[Rule], now: Evidence) -> list[Rule]:
    """Add the rule that fails if any judging image is one of the fit, unless a rule on these images is given."""
    unknown = now.parity is None or now.parity.fitted is None
    if unknown or any(rule.metric == FITTED for rule in rules):
        return [*rules]
    return [*rules, rule_from_text(f"{FITTED} > 0")]


def judge_rows(
    rules: Sequence[Rule], now: Evidence, older: Evidence | None, *, starting: bool
) -> tuple[JudgedRule, ...]:
    """Return every rule judged; with `starting`, rules that need an older record are UNJUDGED without one."""
    return judge(rules, now, older, starting=starting).rules if rules else ()


def write_gate_file(gate: Gate, path: Path) -> None:
    """Write a gate's verdicts as JSON (.json), Markdown (.md) or, with any other suffix, JUnit."""
    if path.suffix == ".json":
        save_gate(gate, path)
    else:
        write_text(path, markdown_from_gate(gate) if path.suffix == ".md" else junit_from_gate(gate))


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    rows = [
        {
            "batch": row.batch,
            "subject": row.subject,
            "ratio": None if row.ratio is None else row.ratio.figures,
            "change": row.change,
        }
        for row in comparison.rows
    ]
    differences = [asdict(difference) for difference in comparison.differences]
    return {"comparable": comparison.comparable, "differences": differences, "rows": rows}
