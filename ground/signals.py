"""Signals that ask a process to end, as exceptions: what is written half is removed, as where Ctrl-C is pressed."""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dis import opmap
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from .errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
"""What service managers, schedulers and containers send, and a terminal that goes."""
AT_ONCE_S = 0.5
"""Signals that come this soon after one that was heard are of the same request, and break into no cleaning up."""
AGAIN_S = 0.05
"""How long after its exception was lost, or could not be raised, a signal is sent again: longer than a finaliser takes.
"""
LONGEST_IMPORT_S = 10.0
_IMPORTER, _NATIVE_LOADER, _IMPORT = "<frozen importlib", "ExtensionFileLoader", opmap["IMPORT_NAME"]


class Terminated(KeyboardInterrupt):
    """A process that was asked to end by another signal than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"

    @property
    def exit_code(self) -> int:
        """As shells have it."""
        return 128 + self.number


def ending(error: BaseException) -> tuple[str, int]:
    """What a process that was interrupted says, and its exit code."""
    how, code = (error.name, error.exit_code) if isinstance(error, Terminated) else ("interrupted", EXIT_INTERRUPTED)
    return f"{how}; finished files are whole, nothing half-written is left", code


def _raised_by(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


def _is_of_signal(error: BaseException | None) -> bool:
    """Whether an exception is a signal's, or was raised while one's was handled."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_native_import(frame: FrameType | None) -> bool:
    """Whether an import is at work that an exception would not leave by way of import statements alone: native modules
    call Python as they begin, and end the process where that raises.
    """
    inner, importing = list[FrameType](), list[FrameType]()
    while frame is not None:
        inner.append(frame)
        if frame.f_code.co_filename.startswith(_IMPORTER):
            importing, inner = importing + inner, []
        frame = frame.f_back
    return not all(_is_plain_import(each) for each in importing)


def _is_plain_import(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_filename.startswith(_IMPORTER):
        return not code.co_qualname.startswith(_NATIVE_LOADER)
    return code.co_code[frame.f_lasti] == _IMPORT


class _SignalHandlers:
    """Hears signals for one process, `formers` being their handlers before: each raises an exception, and once more
    where Python could but print that one, in a finaliser, a weak reference's callback or native code.
    """

    def __init__(self, previous: Mapping[signal.Signals, Any]) -> None:
        self._previous, self._owner = previous, os.getpid()
        self._ignored_until, self._open, self._sending = 0.0, True, threading.Lock()
        self._waits_until: float | None = None
        self._hooks = sys.unraisablehook, sys.excepthook
        self.raised: int | None = None
        self.pending: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            signal.signal(number, self._previous[signal.Signals(number)])
            os.kill(os.getpid(), number)
        elif self._open and (now := time.monotonic()) >= self._ignored_until:
            self._waits_until = self._waits_until or now + LONGEST_IMPORT_S
            if now < self._waits_until and _is_native_import(frame):
                self._send_again(number)
                return
            self._ignored_until, self._waits_until = now + AT_ONCE_S, None
            self.raised, self.pending = number, None
            raise _raised_by(number)

    def install(self) -> None:
        for each in self._previous:
            signal.signal(each, self.handle)
        sys.unraisablehook, sys.excepthook = self._on_unraisable, self._print_exception

    def restore(self) -> None:
        self._open = False
        with self._sending:
            sys.unraisablehook, sys.excepthook = self._hooks
            for each, previous in self._previous.items():
                signal.signal(each, previous)

    def _on_unraisable(self, lost: "UnraisableHookArgs") -> None:
        if self._is_ours(lost.exc_value):
            self._send_again(self.raised)
        else:
            self._hooks[0](lost)

    def _print_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._is_ours(error):
            self._send_again(self.raised)
        else:
            self._hooks[1](kind, error, trace)

    def _is_ours(self, error: BaseException | None) -> bool:
        return self.raised is not None and os.getpid() == self._owner and _is_of_signal(error)

    def _send_again(self, number: int | None) -> None:
        """From a bare thread: one of threading's may wait for a lock that is held where the signal broke in."""
        self._ignored_until, self.pending = 0.0, number
        main = threading.main_thread().ident
        assert number is not None
        assert main is not None
        _thread.start_new_thread(self._send, (number, main))

    def _send(self, number: int, thread: int) -> None:
        time.sleep(AGAIN_S)
        with self._sending:
            if self._open:
                signal.pthread_kill(thread, number)


@contextmanager
def raising_on_signals(*passing: type[Exception]) -> Iterator[None]:
    """Within it ASKS_TO_END raise Ended in this process; in those that it forks they end it as ever. Handlers of
    somebody else's stay, and so does what is ignored (nohup). No traceback of theirs is printed.

    What is raised after a signal was heard, Ctrl-C's too, is the signal's: libraries lose its exception in their native
    code and raise another one, and builders of engines raise KeyboardInterrupt when they have stopped. But for
    `passing`, by which a work says how it ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {each: signal.getsignal(each) for each in (signal.SIGINT, *ASKS_TO_END)}
    handlers = _SignalHandlers(
        {each: has for each, has in previous.items() if has in (signal.SIG_DFL, signal.default_int_handler)}
    )
    try:
        handlers.install()
        yield
        if handlers.pending is not None:  # to be sent again, and the work has ended before
            raise _raised_by(handlers.pending)
    except passing:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if handlers.raised is not None and not isinstance(error, Terminated):
            raise _raised_by(handlers.raised) from error
        raise
    finally:
        try:
            handlers.restore()
        finally:  # a first signal may break into that
            handlers.restore()
