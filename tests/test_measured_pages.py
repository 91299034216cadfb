"""The pages of docs/measured ask a question and answer it in numbers; the table of decoders has those that are read."""

import re
from pathlib import Path

from benchmarks.pages.measured import ON_GPUS, PAGES, SUPPORT
from corp_deploy.families.decoder_config import MODEL_TYPES
from tests import decoders
from tests.pages import DOCS, ROOT


def test_every_measured_page_begins_with_a_question_and_a_finding() -> None:
    for page in PAGES.keys() - {SUPPORT}:
        _, question, *others = (ROOT / page).read_text().split("\n\n")
        assert re.match(r"\*[A-Z][^*]*\?\*", question), page
        finding = others[others.index('<div class="figures" markdown>') - 1]
        assert len(re.findall(r"\d+", finding)) >= 4, page


def test_index_page_links_all_measured_pages() -> None:
    first = (DOCS / "measured" / "index.md").read_text()
    for page in (*PAGES, ON_GPUS):
        assert f"({Path(page).name})" in first or page == SUPPORT, page


def test_decoder_table_lists_supported_and_tested_decoders() -> None:
    named = re.findall(r"^\| [^`|]*\(`(\w+)`\)", (ROOT / SUPPORT).read_text(), re.MULTILINE)
    assert named == list(MODEL_TYPES)
    assert set(named) <= set(decoders.KINDS)
