"""One of two models that are timed side by side."""

from dataclasses import dataclass

from calib.fingerprints import Fingerprints
from ground.ports import Port
from perf.bench.bench import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of the two as perf's subject, what it takes, its fixed batch if any, and what it was fitted to
    where it tells.
    """

    subject: Subject
    inputs: tuple[Port, ...]
    static_batch: int | None
    fitted: Fingerprints | None = None
