"""The report as JUnit XML, for a CI's test tab."""

from collections.abc import Sequence
from xml.etree import ElementTree

from .content import Content

TAGS = {
    "PASS": "system-out",
    "NOTED": "system-out",
    "FAIL": "failure",
    "INCONCLUSIVE": "error",
    "NOT-COMPARABLE": "error",
}


def junit_from_content(content: Content) -> str:
    """Links, structural tests and gate rules as test cases, as the gate writes its own: FAIL is a failure, what could
    not be decided an error, what had no limit is skipped.
    """
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
    tags = [TAGS.get(status, "skipped") for _, status, _ in rows]
    totals = {"failures": tags.count("failure"), "skipped": tags.count("skipped"), "errors": tags.count("error")}
    counts = {"tests": str(len(rows)), **{key: str(total) for key, total in totals.items()}}
    suite = ElementTree.SubElement(parent, "testsuite", {"name": name, **counts})
    if line is not None:
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(properties, "property", {"name": "verdict", "value": line})
    for (case, status, why), tag in zip(rows, tags, strict=True):
        element = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": case})
        if tag == "system-out":
            ElementTree.SubElement(element, tag).text = why
        else:
            ElementTree.SubElement(element, tag, {"message": why if status == "FAIL" else f"{status}: {why}"})
