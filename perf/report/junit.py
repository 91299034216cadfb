"""The report as JUnit XML, for a CI's test tab."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from .content import Content


def junit_from_content(content: Content) -> str:
    """Links, structural tests and gate rules as test cases: FAIL is a failure, what could not be judged is skipped."""
    suites = ElementTree.Element("testsuites", name=content.title)
    links, structure = (content.parity.links, content.parity.structure) if content.parity else ((), ())
    lines = {"parity": content.parity.line} if content.parity else {}
    cases: dict[str, list[tuple[str, str, str]]] = {
        "parity": [(link.name, link.status, link.reason) for link in links],
        "structure": [(f"{test.test} of {test.candidate}", test.status, test.reason) for test in structure],
        "gate": [(line.rule, line.verdict, line.message) for line in content.gate],
    }
    for suite, rows in cases.items():
        if rows:
            _suite(suites, suite, rows, lines.get(suite))
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _suite(parent: ElementTree.Element, name: str, rows: Sequence[tuple[str, str, str]], line: str | None) -> None:
    failures = sum(status == "FAIL" for _, status, _ in rows)
    skipped = sum(status not in ("PASS", "FAIL", "NOTED") for _, status, _ in rows)
    counts = {"tests": str(len(rows)), "failures": str(failures), "skipped": str(skipped), "errors": "0"}
    suite = ElementTree.SubElement(parent, "testsuite", {"name": name, **counts})
    if line is not None:
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(properties, "property", {"name": "verdict", "value": line})
    for case, status, why in rows:
        element = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": case})
        if status == "FAIL":
            ElementTree.SubElement(element, "failure", {"message": why})
        elif status not in ("PASS", "NOTED"):
            ElementTree.SubElement(element, "skipped", {"message": f"{status}: {why}"})
        else:
            ElementTree.SubElement(element, "system-out").text = why
