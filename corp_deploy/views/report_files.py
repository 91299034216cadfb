"""Reports as files: that of a directory's records, and that of releases over time."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from corp_deploy.proof.past_releases import read_past_releases
from corp_deploy.proof.report_input import effort_lines, gather_report
from corp_deploy.release.pace import efforts_in
from ground.errors import BadInput
from ground.files import write_text
from perf.report.page import html_from_content
from perf.report.past_markdown import markdown_from_past
from perf.report.past_page import html_from_past
from perf.report.render import csv_from_content, junit_from_content, markdown_from_content

W = TypeVar("W", bound=Callable[..., str])
OF_RECORDS = {
    ".html": html_from_content,
    ".md": markdown_from_content,
    ".csv": csv_from_content,
    ".xml": junit_from_content,
}
OF_HISTORIES = {".html": html_from_past, ".md": markdown_from_past}


def write_report(directory: Path | None, history: Path | None, output: Path, title: str | None) -> None:
    """Write the report of a directory's records or of a history; the suffix of `output` chooses the format."""
    if (directory is None) == (history is None):
        got = "neither" if history is None else "both"
        raise BadInput(f"a report is of one directory of records, or of releases over time (--history): got {got}")
    if history is not None:
        _write_history_report(history, output, title)
    elif directory is not None:
        _write_record_report(directory, output, title)


def _write_record_report(directory: Path, output: Path, title: str | None) -> None:
    write = _writer(OF_RECORDS, output)
    content = gather_report(directory, title)
    of_release = effort_lines(efforts_in(directory))
    write_text(output, write(replace(content, effort=of_release or content.effort)))


def _write_history_report(history: Path, output: Path, title: str | None) -> None:
    write = _writer(OF_HISTORIES, output)
    if output.resolve().parent == history.resolve():
        raise BadInput(f"--history {history} keeps the records of releases: write the report elsewhere")
    past = read_past_releases(history)
    write_text(output, write(past, title or f"{history.resolve().name}: releases over time"))


def _writer(writers: Mapping[str, W], output: Path) -> W:
    if output.suffix not in writers:
        of_history = " with --history" if writers.keys() == OF_HISTORIES.keys() else ""
        raise BadInput(f"--output {output}: expected one of {', '.join(writers)}{of_history}")
    return writers[output.suffix]
