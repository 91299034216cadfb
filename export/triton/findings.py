"""Faults of a model repository: where, how bad, what to do."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One fault: where it lies, how bad it is (error: it will not load or serve), and what to do."""

    severity: str
    path: Path = Path("config.pbtxt")
    line: int | None
    what: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return f"{where}: {self.severity}: {self.what}; {self.remedy}"


def finding(path: Path, severity: str, what: str, remedy: str, line: int | None = None) -> LintFinding:
    """A Finding, by position."""
    return LintFinding(severity=severity, path=path, line=line, what=what, remedy=remedy)


def error(line: int, what: str, remedy: str) -> LintFinding:
    """Of a config, wherever that lies."""
    return LintFinding(severity=ERROR, line=line, what=what, remedy=remedy)


def warning(line: int, what: str, remedy: str) -> LintFinding:
    """As `error`, of what loads and serves."""
    return LintFinding(severity=WARNING, line=line, what=what, remedy=remedy)


def in_config(path: Path, faults: Iterable[LintFinding]) -> Iterator[LintFinding]:
    """Those of the config that lies there."""
    return (replace(each, path=path) for each in faults)
