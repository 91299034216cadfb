"""Lines on stderr that name the phase of a command while it prints nothing else, such as an import or a trace.

Imports nothing heavy, since it runs before torch is loaded.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

AFTER_S = 2.0
"""The seconds that a command may be silent."""
PHASES = {
    "corp_deploy.traced.programs": "tracing the model",
    "corp_deploy.traced": "looking for what can be reduced",
    "corp_deploy.families": "reading the model",
    "corp_deploy.store": "reading the model",
    "corp_deploy.release.digests": "comparing files with what was made of them",
    "corp_deploy.release.recipe_checks": "checking what the recipe names",
    "corp_deploy.release.recipe_read": "checking what the recipe names",
    "corp_deploy.reduction": "working on the sites",
    "corp_deploy.algebra": "solving for the weights",
    "corp_deploy.planning": "choosing the widths",
    "corp_deploy.polish": "polishing",
    "corp_deploy.proof": "comparing the models",
    "calib": "reading the inputs",
    "export": "making a graph",
    "perf": "running the models",
}
"""The phases of a command by beginnings of modules' names; the first match counts."""
OWN = ("corp_deploy", "calib", "export", "ground", "perf")
_IMPORT, _IMPORTER = "_find_and_load", "<frozen importlib"


def phase_of(frames: Sequence[FrameType]) -> str:
    """Return the phase, in words, of a stack of frames, innermost first: of PHASES, "loading LIBRARY" or "working"."""
    loaded = ""
    for frame in frames:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if code.co_filename.startswith(_IMPORTER):
            package = str(frame.f_locals.get("name", "")).partition(".")[0] if code.co_name == _IMPORT else ""
            loaded = loaded if package in (*OWN, "") else package  # the outermost of libraries that import one another
        elif module.partition(".")[0] not in OWN:
            loaded = loaded if code.co_name == "<module>" else ""  # a function of a library loads something small
        elif loaded:
            break
        elif (words := next((words for start, words in PHASES.items() if module.startswith(start)), None)) is not None:
            return words
    return f"loading {loaded}" if loaded else "working"


def _frames_of_main() -> list[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list[FrameType]()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Waiting:
    """A printer of a command's phase after AFTER_S seconds without output, each phase once."""

    def __init__(
        self,
        *,
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.monotonic,
        frames: Callable[[], Sequence[FrameType]] = _frames_of_main,
    ) -> None:
        self._say, self._clock, self._frames = say, clock, frames
        self._heard_at, self._bars, self._printed = clock(), 0, set[str]()
        self._ended = threading.Event()

    def restart(self) -> None:
        """Count the silence from now, because something was printed."""
        self._heard_at = self._clock()

    def look(self) -> None:
        """Print the phase, if it is new, after AFTER_S seconds of silence without a progress bar."""
        if self._bars or self._clock() - self._heard_at < AFTER_S:
            return
        phase = phase_of(self._frames())
        if phase not in self._printed:
            self._printed.add(phase)
            self._say(f"{phase} ...")
        self.restart()

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Suppress phases within this context, in which a progress bar is shown."""
        self._bars += 1
        try:
            yield
        finally:
            self._bars -= 1
            self.restart()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call `look` from a thread of its own within this context."""

        def watch() -> None:
            while not self._ended.wait(AFTER_S / 8):
                self.look()

        threading.Thread(target=watch, daemon=True, name="waiting").start()
        try:
            yield
        finally:
            self._ended.set()


def waits_quietly(words: Sequence[str]) -> bool:
    """Return True if a command prints no phases: it is quiet, prints JSON, or has a rank above 0."""
    return bool({"-q", "--quiet", "--json"} & {*words}) or os.environ.get("RANK", "0") != "0"
