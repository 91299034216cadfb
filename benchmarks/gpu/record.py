"""The rows of one part on disk; the file is written after every row, so that a later run can continue.

The status of a row is done, absent (no such package or device), refused (the timed call had other outputs than a plain
call), oom, or failed. Rows for which time was too short are listed under `skipped` with the reason. The next run makes
every row that is not done.
"""

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ground.errors import Missing, is_out_of_memory
from ground.files import write_json
from ground.records import record_from_file

Row = dict[str, Any]


class Refused(RuntimeError):
    """A timed call with other outputs than a plain call, so that its times are worthless."""


class OtherMachine(ValueError):
    """The record in the output folder was measured on another machine or with other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row to be made: its key, unique in the part, its estimated seconds, and the function that makes it."""

    key: str
    estimate_s: float
    run: Callable[[], Row]


@dataclass(frozen=True, slots=True)
class Budget:
    """Time left until a moment of the clock."""

    ends_s: float
    clock: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        return self.ends_s - self.clock()

    def part(self, share: float) -> "Budget":
        """Return a share of the time left."""
        return Budget(self.clock() + share * max(self.left_s(), 0.0), self.clock)


class Record:
    """The rows of one part, in the order made, and their file.

    Raises OtherMachine where the rows of an earlier run don't belong to this environment or these settings.
    """

    def __init__(
        self,
        path: Path,
        part: str,
        environment: Mapping[str, Any],
        settings: Mapping[str, Any],
        must_match: Sequence[str] = (),
    ) -> None:
        self.path, self.part = path, part
        self.environment, self.settings = dict(environment), dict(settings)
        self.rows: list[Row] = []
        self.skipped: dict[str, str] = {}
        self.tried: set[str] = set()
        if not path.is_file():
            return
        held = record_from_file(path, dict[str, Any], kind=f"benchmarks/gpu/{part}")
        differing = [
            f"{key}: {held['environment'].get(key)!r} then, {environment.get(key)!r} now"
            for key in must_match
            if held["environment"].get(key) != environment.get(key)
        ]
        if held["settings"] != self.settings:
            differing.append(f"settings: {held['settings']} then, {self.settings} now")
        if differing:
            told = "; ".join(differing)
            raise OtherMachine(f"{path}: its rows were measured otherwise ({told}); name another --output")
        self.environment, self.rows = held["environment"], held["rows"]
        self.skipped = {each["key"]: each["reason"] for each in held["skipped"]}

    def done(self, key: str) -> bool:
        """Return whether the row of this key was measured."""
        return any(row["key"] == key and row["status"] == "done" for row in self.rows)

    def put(self, row: Row) -> None:
        """Add a row, in place of an earlier one of its key, and write the file."""
        self.tried.add(row["key"])
        self.skipped.pop(row["key"], None)
        self.rows = [each for each in self.rows if each["key"] != row["key"]] + [row]
        write_json(self.path, self.as_json())

    def skip(self, key: str, reason: str) -> None:
        """List a row for which time was too short."""
        self.skipped[key] = reason
        write_json(self.path, self.as_json())

    def as_json(self) -> Row:
        return {
            "kind": f"benchmarks/gpu/{self.part}",
            "version": 1,
            "environment": self.environment,
            "settings": self.settings,
            "rows": self.rows,
            "skipped": [{"key": key, "reason": reason} for key, reason in self.skipped.items()],
        }


def made(task: Task, clock: Callable[[], float]) -> Row:
    """Return the task's row with its status; an interrupt is raised."""
    started = clock()
    row: Row = {"key": task.key}
    try:
        row |= {"status": "done", **task.run()}
    except (ImportError, Missing) as error:
        row |= {"status": "absent", "reason": reason_of(error)}
    except Refused as error:
        row |= {"status": "refused", "reason": reason_of(error)}
    except Exception as error:
        traceback.print_exc()
        row |= {"status": "oom" if is_out_of_memory(error) else "failed", "reason": reason_of(error)}
    return row | {"row_seconds": clock() - started, "at": datetime.now(UTC).isoformat(timespec="seconds")}


def reason_of(error: BaseException) -> str:
    """Return an error on one line of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def work(
    record: Record,
    tasks: Sequence[Task],
    budget: Budget,
    *,
    state: Callable[[], Row | None],
    say: Callable[[str], None],
) -> None:
    """Make the missing rows in order while there is time; `state` returns the GPU's state after each.

    Estimates are for a large data-centre GPU. They are scaled by the pace of the rows so far.
    """
    taken_s = estimated_s = 0.0
    for task in tasks:
        if record.done(task.key) or task.key in record.tried:
            continue
        pace = max(taken_s / estimated_s, 1.0) if estimated_s else 1.0
        needed_s, left_s = task.estimate_s * pace, budget.left_s()
        if needed_s > left_s or left_s <= 0.0:
            record.skip(task.key, f"needs about {needed_s:.0f} s, {max(left_s, 0.0):.0f} s were left")
            continue
        row = made(task, budget.clock)
        if row["status"] == "oom":
            gc.collect()  # it takes a third of a second, so not after every row
        record.put(row | {"gpu_after": state()})
        told = f"{record.part}: {task.key}: {row['status']} in {row['row_seconds']:.1f} s"
        say(f"{told} {row['reason']}" if "reason" in row else told)
        if row["status"] == "done":
            taken_s, estimated_s = taken_s + row["row_seconds"], estimated_s + task.estimate_s
