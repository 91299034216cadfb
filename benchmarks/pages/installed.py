"""The table of versions that were installed together and tested, from the record of release/installs.py."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import table
from benchmarks.release.installs import RECORD
from corp_deploy.machine import FLOORS


def _tests(part: Mapping[str, Any]) -> str:
    """Return the counts of the tests; skipped ones need a GPU or a package that isn't installed."""
    ran = part.get("tests")
    return "not run" if ran is None else f"{ran['passed']:,} passed, {ran['failed']} failed, {ran['skipped']} skipped"


def installed() -> str:
    """Return the table of versions: Python, each package that has a floor, and the tests."""
    parts = [json.loads(RECORD.read_text(encoding="utf-8"))["environments"][name] for name in ("lowest", "highest")]
    packages = sorted(name for name in FLOORS if all(name in part["packages"] for part in parts))
    rows = [("Python", *(part["python"] for part in parts))]
    rows += [(name, *(part["packages"][name] for part in parts)) for name in packages]
    rows += [("tests", *map(_tests, parts))]
    return table(("package", "lowest", "highest"), rows)
