"""Conversion of termination signals to exceptions, so that half-written files are removed as after Ctrl-C."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .errors import EXIT_INTERRUPTED

ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
"""SIGTERM comes from service managers, schedulers and containers, SIGHUP from a closing terminal."""
AT_ONCE_S = 0.5
"""Signals within this time after a raised one are ignored, so that they don't interrupt the clean-up."""
AGAIN_S = 0.05
LONGEST_IMPORT_S = 10.0


class Terminated(KeyboardInterrupt):
    """An interruption by another signal than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def describe_interruption(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code, as shells define it, of an interrupted process."""
    how, code = "interrupted", EXIT_INTERRUPTED
    if isinstance(error, Terminated):
        how, code = f"ended by {signal.Signals(error.number).name}", 128 + error.number
    return f"{how}; finished files are whole, nothing half-written is left", code


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


class _Handler:
    """A signal handler that raises an exception.

    It waits until imports are done, because an exception while a native module loads ends the process. It raises again
    if Python could only print the exception, as in a finaliser or in native code.
    """

    def __init__(self) -> None:
        signals = {each: signal.getsignal(each) for each in (signal.SIGINT, *ASKS_TO_END)}
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        self.previous: dict[signal.Signals, Any] = {each: by for each, by in signals.items() if by in defaults}
        self.hooks, self.owner = (sys.unraisablehook, sys.excepthook), os.getpid()
        self.number, self.quiet_until, self.import_until = 0, 0.0, 0.0
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self.owner:
            signal.signal(number, self.previous[signal.Signals(number)])
            os.kill(os.getpid(), number)
        elif number == signal.SIGALRM or now >= self.quiet_until:
            self.number = self.number if number == signal.SIGALRM else number
            self.import_until = self.import_until or now + LONGEST_IMPORT_S
            if now < self.import_until and _is_importing(frame):
                self.come_again()
                return
            self.quiet_until, self.import_until, self.pending = now + AT_ONCE_S, 0.0, False
            raise self.exception()

    def exception(self) -> KeyboardInterrupt:
        return KeyboardInterrupt() if self.number == signal.SIGINT else Terminated(self.number)

    def come_again(self) -> None:
        self.pending = True
        self.previous.setdefault(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        signal.signal(signal.SIGALRM, self)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def lost(self, error: BaseException | None) -> bool:
        """Return whether an exception that Python only prints comes from a signal; if so, have it raised again soon."""
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__cause__ or error.__context__
        if error is None or not self.number or os.getpid() != self.owner:
            return False
        self.come_again()
        return True

    def install(self) -> None:
        for each in self.previous:
            signal.signal(each, self)
        unraisable, uncaught = self.hooks
        sys.unraisablehook = lambda info: None if self.lost(info.exc_value) else unraisable(info)
        sys.excepthook = lambda kind, error, trace: None if self.lost(error) else uncaught(kind, error, trace)

    def restore(self) -> None:
        if signal.SIGALRM in self.previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook, sys.excepthook = self.hooks
        for each, previous in self.previous.items():
            signal.signal(each, previous)


@contextmanager
def raising_on_signals(*passing: type[Exception]) -> Iterator[None]:
    """Raise Terminated in this process when a signal of ASKS_TO_END comes; forked processes end as usual.

    Handlers of other libraries and ignored signals (nohup) stay. After a signal, its exception replaces all others
    except `passing`, because native code may lose the signal's exception and raise another one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    try:
        handler.install()
        yield
        if handler.pending:
            raise handler.exception()
    except passing:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if handler.number and not isinstance(error, Terminated):
            raise handler.exception() from error
        raise
    finally:
        handler.restore()
