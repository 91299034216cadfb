"""SARIF 2.1.0: the findings of `package lint` for code scanning."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corp_deploy import __version__
from export.triton.lint_artifact import RULES, LintFinding
from ground.text import printable

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
"""The name of the directory that code scanning takes relative paths from: the root of a checkout."""


def sarif_from_findings(findings: Sequence[LintFinding], root: Path) -> str:
    """Return the findings as JSON; files below the directory `root` get paths relative to it."""
    texts = ("shortDescription", "fullDescription", "help")  # code scanning refuses rules without one of them
    rules = [{"id": rule, **{key: {"text": text} for key in texts}} for rule, text in RULES.items()]
    driver = {"name": "corp-deploy package lint", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(each, root.resolve()) for each in findings]}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(finding: LintFinding, root: Path) -> dict[str, Any]:
    region = {} if finding.line is None else {"region": {"startLine": finding.line}}
    # Braces are placeholders of messages unless they are doubled.
    text = printable(f"{finding.what}; {finding.remedy}").replace("{", "{{").replace("}", "}}")
    return {
        "ruleId": finding.rule,
        "ruleIndex": list(RULES).index(finding.rule),
        "level": finding.severity,
        "message": {"text": text},
        "locations": [{"physicalLocation": {"artifactLocation": _place(finding.path, root), **region}}],
    }


def _place(path: Path, root: Path) -> dict[str, str]:
    """Return where a file is, with links in its last part not followed, since they may be the fault."""
    place = path.parent.resolve() / path.name
    if place.is_relative_to(root) and place != root:
        return {"uri": (Path("/") / place.relative_to(root)).as_uri().removeprefix("file:///"), "uriBaseId": ROOT}
    return {"uri": place.as_uri()}
