"""Faults of a model repository: where, how bad, what to do."""

from dataclasses import dataclass
from pathlib import Path

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """One thing wrong in one file; the line is 0 where the file as a whole is meant."""

    severity: str
    line: int
    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One fault: where it lies, how bad it is (error: it will not load or serve), and what to do."""

    severity: str
    path: Path
    line: int | None
    what: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return f"{where}: {self.severity}: {self.what}; {self.remedy}"


def from_complaint(path: Path, complaint: Complaint) -> LintFinding:
    """The complaint about this file."""
    return finding(path, complaint.severity, complaint.what, complaint.remedy, complaint.line)


def finding(path: Path, severity: str, what: str, remedy: str, line: int | None = None) -> LintFinding:
    """A Finding, by position."""
    return LintFinding(severity=severity, path=path, line=line, what=what, remedy=remedy)
