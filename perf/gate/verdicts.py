"""Writers of a judged gate as JSON, JUnit XML and Markdown."""

from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from ground.files import write_json
from ground.quantity import format_number
from ground.records import record_from_file
from ground.text import markdown_line, printable

from .gate import Gate, JudgedRule

KIND, VERSION = "gate", 1
AGAIN = "make the record again with `corp-deploy gate`"


def save_gate(gate: Gate, path: Path) -> None:
    head = {"kind": KIND, "version": VERSION, "verdict": gate.verdict, "exit_code": gate.exit_code}
    write_json(path, {**head, **asdict(gate)}, indent=1)


def load_gate(path: Path) -> Gate:
    return record_from_file(path, Gate, kind=KIND, version=VERSION, remedy=AGAIN)


def junit_from_gate(gate: Gate) -> str:
    judged = gate.rules
    failed = sum(rule.verdict == "FAIL" for rule in judged)
    errors = sum(rule.verdict in ("INCONCLUSIVE", "NOT-COMPARABLE") for rule in judged)
    skipped = sum(rule.verdict == "UNJUDGED" for rule in judged)
    counts = {"tests": len(judged), "failures": failed, "errors": errors, "skipped": skipped}
    attributes = {"name": "corp-deploy gate"} | {key: str(count) for key, count in counts.items()}
    suite = ElementTree.Element("testsuite", attributes)
    for rule in judged:
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=printable(rule.rule))
        if rule.verdict == "PASS":
            ElementTree.SubElement(case, "system-out").text = printable(rule.message)
            continue
        tag = {"FAIL": "failure", "UNJUDGED": "skipped"}.get(rule.verdict, "error")
        ElementTree.SubElement(case, tag, type=rule.verdict, message=printable(rule.message))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def markdown_from_gate(gate: Gate) -> str:
    lines = [f"**Gate: {gate.verdict}**", "", "| verdict | must not be | measured | why |", "|---|---|---|---|"]
    lines += [
        f"| {rule.verdict} | `{_cell(rule.rule)}` | {_measured(rule)} | {markdown_line(rule.message)} |"
        for rule in gate.rules
    ]
    return "\n".join(lines) + "\n"


def _measured(rule: JudgedRule) -> str:
    if rule.value is None:
        return "-"
    if rule.low is None or rule.high is None or rule.low == rule.high:
        return format_number(rule.value, 4)
    return f"{format_number(rule.value, 4)} ({format_number(rule.low, 4)} to {format_number(rule.high, 4)})"


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("\n", " ")
