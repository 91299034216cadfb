"""The pages of docs/measured say what they found in numbers, and refuse to say it of records that found otherwise."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import decoders, findings
from benchmarks.pages.measured import ON_GPUS, PAGES, SUPPORT, contents
from corp_deploy.families.decoder_config import MODEL_TYPES
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


def test_the_table_of_decoders_is_of_those_that_are_read_and_tried() -> None:
    text = decoders.decoders()
    lines = {match[1]: match[0] for match in re.finditer(r"^\| [^`]*\(`(\w+)`\).*$", text, re.MULTILINE)}
    assert list(lines) == list(MODEL_TYPES)
    assert set(lines) <= set(small_decoders.KINDS)
    assert "`ffn_dim` |" in lines["opt"]
    assert lines["llama"].endswith("`intermediate_size`, fewer groups | yes |")
    assert "kept" in lines["qwen3"]
    assert "kept" not in lines["qwen2"]
