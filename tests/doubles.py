"""A clock that stands until it is moved, what every double of a runner has, and a value that has to be there."""

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Self, TypeVar

import numpy as np

from ground.feeds import Feeds, Outputs, batch_size
from perf.record.runs import Flat
from perf.runners.protocol import MemoryGauge

T = TypeVar("T")


@dataclass
class FakeClock:
    now_ns: int = 0
    lock: Any = field(default_factory=Lock, repr=False)

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, ms: float) -> None:
        with self.lock:  # streams are threads
            self.now_ns += round(ms * 1e6)


def some(value: T | None) -> T:
    """The value, which is not None."""
    assert value is not None
    return value


class DoubleOfRunner:
    """Opens nothing, holds no memory of its own and answers ten logits of zero."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, feeds: Feeds) -> Outputs:
        return {"logits": np.zeros((batch_size(feeds), 10), np.float32)}

    def gauge(self) -> MemoryGauge | None:
        return None

    def describe(self) -> Flat:
        return {"backend": "fake", "device": "cpu"}
