"""A calibration's state on disk: an interrupted one goes on where it was and ends with the same bits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ground.errors import BadInput
from ground.records import record_from_text

from .distributed import Ranks
from .moments import Moments
from .store import load, save

STATE, VERSION = "calib.resume", 2
_REMEDY = "remove the file to start afresh"


def refuse_other_run(where: str, saved: Mapping[str, str], run: Mapping[str, str]) -> None:
    """Raises BadInput, beginning with `where`, for a state that another run than this one has saved."""
    for key in sorted({*run, *saved}):
        if run.get(key) != saved.get(key):
            raise BadInput(
                f"{where}: {key} was {saved.get(key)!r}, now {run.get(key)!r}; {_REMEDY}, or repeat the interrupted "
                "run's options"
            )


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a calibration came: the next position of the images and those that could not be read; `run` holds all
    that must be equal to go on.
    """

    position: int
    bad: tuple[str, ...]
    run: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFile:
    """Saved to `path` after every `every` images; with several processes each has its own file beside it."""

    path: Path
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadInput(f"checkpoint every: got {self.every} images, expected at least 1")

    def of_rank(self, ranks: Ranks) -> "ResumeFile":
        if ranks.size == 1:
            return self
        name = f"{self.path.stem}.rank{ranks.rank}of{ranks.size}{self.path.suffix}"
        return replace(self, path=self.path.with_name(name))

    def due(self, before: int, now: int) -> bool:
        """Whether a multiple of `every` images was passed."""
        return before // self.every < now // self.every

    def save(self, moments: Moments, progress: Progress) -> None:
        """Replaces the file in one step."""
        state = json.dumps({"kind": STATE, "version": VERSION, **msgspec.to_builtins(progress)}, sort_keys=True)
        save(replace(moments, lineage={STATE: state}), self.path)

    def load(self, run: Mapping[str, str]) -> tuple[Moments, Progress] | None:
        """What was saved, or None without a file. Raises BadInput for the state of another run."""
        if not self.path.exists():
            return None
        moments = load(self.path, remedy=_REMEDY)
        if STATE not in moments.lineage:
            raise BadInput(f"{self.path}: holds moments, not a calibration's checkpoint; give another checkpoint path")
        state = record_from_text(
            moments.lineage[STATE],
            Progress,
            where=f"{self.path}: not a calibration's checkpoint",
            kind=STATE,
            version=VERSION,
            remedy=_REMEDY,
        )
        refuse_other_run(f"{self.path}: checkpoint of another run", state.run, run)
        return moments, state

    def clear(self) -> None:
        """Removes the file, once its run's moments are safe."""
        self.path.unlink(missing_ok=True)
