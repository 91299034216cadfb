"""The pages of docs/measured ask a question and answer it in numbers; the table of decoders has those that are read."""

import re
from pathlib import Path

from benchmarks.pages.measured import ON_GPUS, PAGES, SUPPORT
from corp_deploy.families.decoder_config import MODEL_TYPES
from tests import decoders
from tests.pages import DOCS, ROOT


def test_every_page_of_figures_begins_with_a_question_and_a_finding() -> None:
    for page in PAGES.keys() - {SUPPORT}:
        _, question, *others = (ROOT / page).read_text().split("\n\n")
        assert re.match(r"\*[A-Z][^*]*\?\*", question), page
        finding = others[others.index('<div class="figures" markdown>') - 1]
        assert len(re.findall(r"\d+", finding)) >= 4, page


def test_the_first_page_leads_to_all_others() -> None:
    first = (DOCS / "measured" / "index.md").read_text()
    for page in (*PAGES, ON_GPUS):
        assert f"({Path(page).name})" in first or page == SUPPORT, page


def test_the_table_of_decoders_is_of_those_that_are_read_and_tried() -> None:
    named = re.findall(r"^\| [^`|]*\(`(\w+)`\)", (ROOT / SUPPORT).read_text(), re.MULTILINE)
    assert named == list(MODEL_TYPES)
    assert set(named) <= set(decoders.KINDS)
