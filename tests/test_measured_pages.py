"""The pages of docs/measured say what they found in numbers, and refuse to say it of records that found otherwise."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import cost_page, decoders, findings, measurement_page
from benchmarks.pages.error_picture import NAMES, real_encoder
from benchmarks.pages.measured import ON_GPUS, PAGES, SUPPORT, contents
from corp_deploy.families.decoder import MODEL_TYPES
from tests import decoders as small_decoders
from tests.pages import DOCS, ROOT


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return content


def test_every_page_of_figures_begins_with_a_finding() -> None:
    assert set(findings.FINDINGS) == set(PAGES) - {SUPPORT}
    for page, finding in findings.FINDINGS.items():
        assert len(re.findall(r"\d+", finding())) >= 4, page
        assert contents()[page].startswith(finding()), page


def test_every_page_asks_a_question_first() -> None:
    for page in (DOCS / "measured").glob("*.md"):
        if page.name != "index.md":
            assert re.match(r"\*[A-Z][^*]*\?\*", page.read_text().split("\n\n")[1]), page.name


def test_the_first_page_leads_to_all_others() -> None:
    first = (DOCS / "measured" / "index.md").read_text()
    for page in (*PAGES, ON_GPUS):
        assert f"({Path(page).name})" in first or page == SUPPORT, page


@pytest.mark.parametrize(
    ("name", "method", "finding"),
    [
        ("real_vit", "best", findings.real_models),
        ("hard_vit", "best, by site", findings.methods),
        ("trained_decoder", "best", findings.decoders),
    ],
)
def test_no_sentence_is_made_of_a_record_that_says_otherwise(
    name: str, method: str, finding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    shutil.copytree(findings.RESULTS, results)
    monkeypatch.setattr(findings, "RESULTS", results)
    assert finding()
    changed = record(name)
    for row in changed["rows"]:
        if row.get("method") == method:
            row.update({"class_error": 9.0, "accuracy": 0.0, "ratio": {"value": 9.0}})
    (results / f"{name}.json").write_text(json.dumps(changed))
    with pytest.raises(AssertionError):
        finding()


def test_a_false_alarm_is_told() -> None:
    alarms = record("gate_alarms")
    assert "there are 0 in 320, so their rate is below 0.94 % at 95 %" in measurement_page.gate_alarms(alarms)
    alarms["by_processes"]["4"]["FAIL"] = 2
    assert "| 4 | 65 | 40 | 25 | 2 | 12 |" in measurement_page.gate_alarms(alarms)


def test_a_naive_comparison_is_right_where_it_fails_what_is_slower() -> None:
    noise = record("gate_noise")
    noise["five_percent_slower"]["naive_fail"] = 33
    noise["against_itself"]["naive_fail"] = 4
    text = measurement_page.gate_noise(noise)
    assert "| 40 | 0 | 40 | 0 | 33 of 40 |" in text
    assert "| 40 | 40 | 0 | 0 | 36 of 40 |" in text


def test_what_timing_adds_is_told_whole() -> None:
    said = measurement_page.harness_overhead({"inside_us": 2.0, "around_us": 8.0, "call_ms": 5.0})
    assert said.endswith("0.20 % of a call of 5 ms.")


def test_memory_that_grows_is_told() -> None:
    runs = record("long_runs")
    runs["serving"]["slope"] = {"mib_per_1000": 1.25, "low": 1.0, "high": 1.5}
    assert "| 42 to 42 | 1.2 (1.0 to 1.5) |" in cost_page.long_runs(runs)


def test_the_table_of_decoders_is_of_those_that_are_read_and_tried() -> None:
    text = decoders.decoders()
    lines = {match[1]: match[0] for match in re.finditer(r"^\| [^`]*\(`(\w+)`\).*$", text, re.MULTILINE)}
    assert list(lines) == list(MODEL_TYPES)
    assert set(lines) <= set(small_decoders.KINDS)
    assert "`ffn_dim` |" in lines["opt"]
    assert lines["llama"].endswith("`intermediate_size`, fewer groups | yes |")
    assert "kept" in lines["qwen3"]
    assert "kept" not in lines["qwen2"]


def test_the_picture_of_errors_shows_what_was_measured_and_no_more() -> None:
    rows = record("real_vit")["rows"]
    drawn = str(real_encoder({"rows": rows}).inline)
    for method, name in (pair for names in NAMES for pair in names.items()):
        own = [row for row in rows if row["method"] == method and row["share"] != 0.66]
        for row in own:
            assert f"<title>{name}, {row['share']:.0%}: {row['class_error']:.4g} relative error" in drawn, row["method"]
        assert drawn.count(f"<title>{name}, ") == len(own)
