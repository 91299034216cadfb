"""Signals that ask a process to end, as exceptions: what is written half is removed, as where Ctrl-C is pressed."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
"""What service managers, schedulers and containers send, and a terminal that goes."""


class Ended(KeyboardInterrupt):
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


def _raised_by(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Ended(number)


@contextmanager
def raising_on_signals(*passing: type[Exception]) -> Iterator[None]:
    """Within it ASKS_TO_END raise Ended in this process; in those that it forks they end it as ever. Handlers of
    somebody else's stay, and so does what is ignored (nohup).

    What is raised after a signal was heard, Ctrl-C's too, is the signal's: libraries lose its exception in their native
    code and raise another one, and builders of engines raise KeyboardInterrupt when they have stopped. But for
    `passing`, by which a work says how it ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, heard = os.getpid(), list[int]()
    formers = {each: signal.getsignal(each) for each in (signal.SIGINT, *ASKS_TO_END)}
    ours = {each: former for each, former in formers.items() if former in (signal.SIG_DFL, signal.default_int_handler)}

    def hear(number: int, _: FrameType | None) -> None:
        if os.getpid() == owner:
            heard.append(number)
            raise _raised_by(number)
        signal.signal(number, ours[signal.Signals(number)])
        os.kill(os.getpid(), number)

    for each in ours:
        signal.signal(each, hear)
    try:
        yield
    except passing:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if heard and not isinstance(error, Ended):
            raise _raised_by(heard[-1]) from error
        raise
    finally:
        for each, former in ours.items():
            signal.signal(each, former)
