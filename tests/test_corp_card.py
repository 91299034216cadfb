"""The model card's Markdown: what stands in names and notes neither ends a line, nor a cell, nor becomes a tag."""

from types import SimpleNamespace
from typing import cast

from corp_deploy.proof.report_input import Covered, ReductionRecord
from corp_deploy.reduction.report import SiteReport
from corp_deploy.release import card
from corp_deploy.release.recipe import Recipe
from corp_deploy.release.recipe_tables import ReduceTable
from perf.report.content import BudgetLine

PLANTED = "blocks|0\n# <b>mlp"
SHOWN = r"blocks\|0 · # \<b>mlp"


def removed(record: ReductionRecord) -> list[str]:
    recipe = cast(Recipe, SimpleNamespace(reduce=ReduceTable(mlp=0.5)))
    return list(card._removed(record, recipe))


def site(name: str) -> SiteReport:
    return SiteReport(
        site=name, part="mlp", width_dense=16, width_asked=8.0, width=8, energy=2.0, error_uncompensated=1.0,
        error=0.5, r2=0.5, condition=1.0, ridge=0.0,
    )  # fmt: skip


def test_a_pipe_and_a_new_line_in_names_and_notes_leave_tables_and_paragraphs_whole() -> None:
    record = ReductionRecord(
        sites=(site(PLANTED),),
        ways=(BudgetLine(name=PLANTED, share=0.5, predicted_error=0.1, measured_error=0.2),),
        decided=(PLANTED,),
        coverage=Covered(verdict=PLANTED, refused={PLANTED: PLANTED}),
    )
    lines = removed(record)
    assert not [line for line in lines if "\n" in line or "<b" in line.replace(r"\<b", "")]
    assert f"Done: {SHOWN}." in lines
    assert f"* {SHOWN} stays as it is: {SHOWN}" in lines
    assert f"B{SHOWN[1:]}." in lines
    assert f"| {SHOWN} | 50.0% | 0.1000 | 0.2000 |" in lines
    assert f"| {SHOWN} | mlp | 16 | 8 | 50.00% | 25 % | - |" in lines


def test_plain_names_stand_as_they_are() -> None:
    assert "| blocks.0.mlp | mlp | 16 | 8 | 50.00% | 25 % | - |" in removed(
        ReductionRecord(sites=(site("blocks.0.mlp"),))
    )
