"""The report as HTML, Markdown, JUnit or CSV, from the records. It prints their verdicts and computes none.

See content_from_record for the record's keys and what is raised.
"""

from collections.abc import Mapping
from typing import Any

from .content import content_from_record
from .junit import junit_from_content
from .long_csv import csv_from_content
from .markdown import markdown_from_content
from .page import html_from_content


def html(record: Mapping[str, Any]) -> str:
    """One self-contained page."""
    return html_from_content(content_from_record(record))


def markdown(record: Mapping[str, Any]) -> str:
    """The same tables for a pull request or a terminal."""
    return markdown_from_content(content_from_record(record))


def csv(record: Mapping[str, Any]) -> str:
    """Every number, unrounded, one a row, with its interval where it has one."""
    return csv_from_content(content_from_record(record))


def junit(record: Mapping[str, Any]) -> str:
    """Links, structural tests and gate rules as test cases."""
    return junit_from_content(content_from_record(record))
