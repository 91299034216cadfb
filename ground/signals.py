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


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Within it ASKS_TO_END raise Ended in this process; in those that it forks they end it as ever. Handlers of
    somebody else's stay, and so does what is ignored (nohup). A KeyboardInterrupt that whoever heard of the signal
    raises afterwards, as builders of engines do once they have stopped, is Ended too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, heard = os.getpid(), list[int]()

    def ended(number: int, _: FrameType | None) -> None:
        if os.getpid() == owner:
            heard.append(number)
            raise Ended(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    ours = [each for each in ASKS_TO_END if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, ended)
    try:
        yield
    except KeyboardInterrupt as error:
        if heard and not isinstance(error, Ended):
            raise Ended(heard[-1]) from error
        raise
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)
