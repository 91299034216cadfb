"""Reasons of verdicts in tables: short ones in the row, long ones below the table."""

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.table import Table

from corp_deploy.views.inspection import inspection_table, refusal_lines
from corp_deploy.views.parity import gate_shown
from corp_deploy.views.speed import noise_caption
from perf.gate.gate import Gate, JudgedRule
from perf.report import tables
from perf.report.content import Content, GateLine, GateLines, list_verdicts

LONG = "100 % (80.64 % to 100 % at 95 % confidence), limit 98 %: the interval straddles the limit; about 189 decide"
RULES = (
    JudgedRule(rule="top1_agreement < 0.98", verdict="INCONCLUSIVE", message=LONG, metric="top1_agreement"),
    JudgedRule(rule="size_bytes > dense * 0.8", verdict="PASS", message="17, limit 18", metric="size_bytes"),
)


def lines_of(*shown: RenderableType) -> list[str]:
    console = Console(file=(file := io.StringIO()), width=100)
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str))
    return file.getvalue().splitlines()


def rows_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("│")]


def test_long_gate_reasons_follow_the_table() -> None:
    lines = lines_of(*gate_shown(Gate(rules=RULES)))
    assert [row.split("│")[3].strip() for row in rows_of(lines)] == ["read below", "17, limit 18"]
    assert lines[-1] == f"top1_agreement < 0.98: {LONG}"


def test_long_report_reasons_are_shortened_and_repeated_in_full() -> None:
    rules = tuple(GateLine(rule=each.rule, verdict=each.verdict, message=each.message) for each in RULES)
    content = Content(title="t", gate=GateLines(verdict="INCONCLUSIVE", rules=rules))
    table, (verdict,) = tables.gate_table(rules), list_verdicts(content)
    assert [row[-1] for row in table.rows] == [LONG.partition("189")[0] + "…", "17, limit 18"]
    assert verdict.why == LONG


def test_reasons_for_kept_sites_are_listed() -> None:
    row = {"width": "channels 8", "parameters": 8, "macs": 8}
    sites = [{**row, "site": f"{place}.mlp", "reason": LONG} for place in range(3)]
    sites.append({**row, "site": "3.mlp", "reason": "its parts are of different sizes"})
    record: dict[str, Any] = {"sites": sites, "fixed": [], "macs": 32}
    cells = [line.split("│")[-2].strip() for line in rows_of(lines_of(inspection_table(record)))]
    assert cells == ["read below"] * 3 + ["its parts are of different sizes"]
    assert refusal_lines(record) == [f"can't be reduced: 0.mlp, 1.mlp and 1 more: {LONG}"]
    assert refusal_lines({**record, "sites": sites[3:]}) == []


@pytest.mark.parametrize("one", ["dense", "a"])
def test_noise_is_reported_below_the_table(one: str) -> None:
    table = Table("batch", "speed-up of all that is", "A/A noise of all that is there", **noise_caption(one))
    table.add_row("1", "1.2", "1.0")
    assert f"A/A noise: {one} against itself" in " ".join(" ".join(lines_of(table)).split())
