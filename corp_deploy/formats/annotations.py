"""GitHub Actions: workflow commands that annotate a run, and the step's summary."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ground.text import printable
from perf.gate.gate import Gate, Verdict

LEVELS: dict[Verdict, str] = {
    **{"FAIL": "error", "NOT-COMPARABLE": "error", "INCONCLUSIVE": "warning", "UNJUDGED": "notice"},
}


def annotate_run(gate: Gate, summary: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield an annotation for each rule that did not pass, and append the Markdown `summary` to that of the step.

    Outside of GitHub Actions nothing is yielded or written. The runner reads annotations from stdout and from stderr.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return
    if path := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{summary}\n")
    for judged in gate.rules:
        if level := LEVELS.get(judged.verdict):
            yield f"::{level} title={_property(f'{judged.verdict}: {judged.rule}')}::{_data(judged.message)}"


def _data(text: str) -> str:
    """Return a text as a command's message: printable, and on one line, since a command ends with its line."""
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
