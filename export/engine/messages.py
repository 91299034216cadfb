"""The log of a build: its messages in memory, its progress, its errors, and its sparse layers."""

import re
from collections.abc import Callable, Collection
from typing import Any

Progress = Callable[[str, int, int], None]  # phase, steps done, steps in all


class Messages:
    """The lines of one build as (severity, text): 0 internal error, 1 error, 2 warning, 3 info, 4 verbose."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.lines)

    @property
    def errors(self) -> list[str]:
        return list(dict.fromkeys(" ".join(text.split()) for severity, text in self.lines if severity <= 1))


def build_logger(trt: Any, messages: Messages) -> Any:

    class RecordingLogger(trt.ILogger):  # type: ignore[misc]  # the bindings come untyped
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            messages.lines.append((int(severity), text))

    return RecordingLogger()


def build_monitor(trt: Any, messages: Messages, progress: Progress | None) -> Any:
    """Return an IProgressMonitor that reports steps to `progress` and cancels a stopped build."""
    totals: dict[str, int] = {}

    class ProgressMonitor(trt.IProgressMonitor):  # type: ignore[misc]  # the bindings come untyped
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            totals[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                if progress is not None:
                    progress(phase_name, step + 1, totals.get(phase_name, step + 1))
            except KeyboardInterrupt:
                messages.stop()
            return not messages.stopped

        def phase_finish(self, phase_name: str) -> None:
            totals.pop(phase_name, None)

    return ProgressMonitor()


def parser_errors(parser: Any) -> list[str]:
    lines = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        node, operator = error.node_name(), error.node_operator()
        where = f"{node} ({operator}): " if node else ""
        lines.append(where + " ".join(error.desc().split()))
    return list(dict.fromkeys(lines))


def prefix_sites(errors: list[str], nodes: Collection[str]) -> list[str]:
    """Prefix builder errors with the sites of the nodes that they mention."""
    if not nodes:
        return errors
    pattern = re.compile("|".join(re.escape(name) for name in sorted(nodes, key=len, reverse=True) if "/" in name))
    with_names = []
    for error in errors:
        sites = list(dict.fromkeys(match.rpartition("/")[0] for match in pattern.findall(error) if match))
        with_names.append(f"{', '.join(sites[:3])}: {error}" if sites else error)
    return with_names


_LINES = tuple(
    re.compile(rf"\(Sparsity\) (?:{names}|{count} layer\(s\) {of}):?(?P<names>.*)")
    for names, count, of in (
        ("Layers eligible for sparse math", r"Found (?P<count>\d+)", "eligible to use sparse tactics"),
        (
            "TRT inference plan picked sparse implementation for layers",
            r"Chose (?P<count>\d+)",
            "using sparse tactics",
        ),
    )
)


def sparse_layers_from_log(text: str) -> dict[str, Any]:
    """Return a record's fields on sparse layers, from the last lines of the log about them.

    TensorRT 8 logs only names, later versions counts; None where the log has no such line.
    """
    (eligible, _), (selected, names) = (_layers_of_line(line, text) for line in _LINES)
    return {"sparse_eligible": eligible, "sparse_layers": selected, "sparse_names": names}


def _layers_of_line(line: re.Pattern[str], text: str) -> tuple[int | None, tuple[str, ...]]:
    *_, last = [None, *line.finditer(text)]
    if last is None:
        return None, ()
    names = tuple(name for part in last["names"].split(", ") if (name := part.strip()))
    return len(names) if last["count"] is None else int(last["count"]), names
