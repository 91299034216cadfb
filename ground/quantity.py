"""Parsing of numbers in options and recipes, with the bounds of each quantity, and formatting of numbers."""

import math
import re
from dataclasses import dataclass

from .errors import BadInput

_DIGITS = re.compile(r"[0-9]{1,19}")
_REAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A range of whole numbers, `low` and `high` included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    @property
    def span(self) -> str:
        return f"{self.low}..{self.high if self.high < 10**6 else ''}"

    def holds(self, value: object) -> bool:
        """Return whether a value from a file is an integer within the bounds."""
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def from_text(self, text: str) -> int:
        """Return the number of a text. Raises BadInput for anything but ASCII digits within the bounds."""
        value = int(text) if _DIGITS.fullmatch(text) else None
        if value is None or not self.holds(value):
            raise BadInput(f"{quoted(text)}: expected {self}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """A range of finite numbers from `low` to `high`, each included unless it is open."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    noun: str = "a number"

    def __str__(self) -> str:
        opening, closing = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"{self.noun} in {opening}{self.low:.15g}, {self.high:.15g}{closing}"

    @property
    def span(self) -> str:
        return f"{self.low:.15g}..{self.high:.15g}"

    def holds(self, value: object) -> bool:
        """Return whether a value from a file is a number within the bounds."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            return False
        return not (self.low_open and value == self.low) and not (self.high_open and value == self.high)

    def from_text(self, text: str) -> float:
        """Return the number of a text. Raises BadInput for anything but a plain decimal number within the bounds."""
        value = float(text) if _REAL.fullmatch(text) and (self.low < 0.0 or text[0] != "-") else math.nan
        if not self.holds(value):
            raise BadInput(f"{quoted(text)}: expected {self}")
        return value


Quantity = Count | Real

BATCH = Count(low=1, high=65_536)


def format_number(value: float, digits: int) -> str:
    """Return a number with `digits` significant digits; one with more before the point is whole, as 1,234,567."""
    shown = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in shown else shown


def quoted(text: str) -> str:
    """Return a received text in quotes, cut to a length that fits a message."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


IMAGES = Count(low=1, high=10**9)
BAD_IMAGES = Count(low=0, high=10**9)
SEED = Count(low=0, high=2**32 - 1)
JOBS = Count(low=1, high=256)
WORKERS = Count(low=0, high=256)
TOKENS = Count(low=1, high=10_000_000)
THREADS = Count(low=1, high=1024)
STREAMS = Count(low=1, high=1024)
STEPS = Count(low=1, high=10**9)
LAUNCHES = Count(low=1, high=100)
ROUNDS = Count(low=6, high=500)
ALIGNMENT = Count(low=1, high=65_536)
OPSET = Count(low=20, high=23)
OPTIMIZATION_LEVEL = Count(low=0, high=5)
WORKSPACE_MIB = Count(low=1, high=2**24)
MODEL_VERSION = Count(low=1, high=2**63 - 1)
QUEUE_DELAY_US = Count(low=0, high=10**8)
INSTANCES = Count(low=1, high=1024)

MEAN = Real(low=-1000.0, high=1000.0)
DEVIATION = Real(low=0.0, high=1000.0, low_open=True)
SHARE = Real(low=0.0, high=1.0, noun="a share")
CONFIDENCE = Real(low=0.0, high=0.999, noun="a share")
SHARE_REMOVED = Real(low=0.0, high=1.0, high_open=True, noun="a share")
SHARE_KEPT = Real(low=0.0, high=1.0, low_open=True, noun="a share")

RIDGE = Real(low=0.0, high=1e6, low_open=True)
ERROR = Real(low=0.0, high=1e6)
MAGNITUDE = Real(low=0.0, high=1e6)
LEVEL = Real(low=0.0, high=1e6)
THRESHOLD = Real(low=-1e6, high=1e6)
FACTOR = Real(low=1.0, high=1e6)
RATIO = Real(low=0.0, high=1e6, low_open=True)
NATS = Real(low=0.0, high=1e6)
GIGABYTES = Real(low=0.0, high=1e6, low_open=True)
SECONDS = Real(low=0.0, high=1e6, low_open=True)
SECONDS_OR_NONE = Real(low=0.0, high=1e6)
MILLISECONDS = Real(low=0.0, high=1e6, low_open=True)
