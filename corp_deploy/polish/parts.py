"""The parts of a polish, one after the other: how far each may go, who hears of it, and its state on disk, from which
an interrupted polish goes on where it was and ends with the same bits.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calib.calibrate import refuse_other_run
from calib.distributed import Ranks
from ground.errors import BadInput
from ground.files import regular_file, replacing
from ground.records import record_from_text

from .descent import Fit, Position, StepBudget, tf32
from .matrices import Matrix
from .options import PolishOptions
from .report import Judged, PartReport

_HEADER = "corp-deploy"
_KIND, _VERSION = "corp-deploy/polish-state", 1
_NUMBERS = ("step", "seconds", "best_error", "curve")
_LISTS = ("values", "means", "squares", "average", "best")


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = _KIND
    version: int = _VERSION
    run: dict[str, str]
    finished: tuple[PartReport, ...]
    step: int
    seconds: float
    best_error: float
    curve: tuple[Judged, ...]


def state_beside(directory: Path) -> Path:
    """Where the state of the polish of a model that is written to a directory stands."""
    return directory.absolute().with_name(f"{directory.absolute().name}.polish-unfinished.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishState:
    """The position of the part at work, the reports of the parts before it, and the matrices that those left."""

    position: Position
    finished: tuple[PartReport, ...]
    matrices: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """Where the state stands; `run` holds all that must be equal to go on."""

    path: Path
    run: Mapping[str, str]

    def save(self, reached: PolishState) -> None:
        """Replaces the file in one step."""
        position = reached.position
        numbers: dict[str, Any] = {name: getattr(position, name) for name in _NUMBERS}
        header = _Header(run=dict(self.run), finished=reached.finished, **numbers)
        tensors = {f"matrices/{name}": tensor for name, tensor in reached.matrices.items()}
        for name in _LISTS:
            tensors |= {f"{name}/{index}": tensor for index, tensor in enumerate(getattr(position, name))}
        cpu_tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        with replacing(self.path) as temporary:
            save_file(cpu_tensors, temporary, metadata={_HEADER: json.dumps(msgspec.to_builtins(header))})

    def load(self, device: torch.device) -> PolishState | None:
        """What was saved, or None without a file. Raises BadInput for what is no state, or that of another run."""
        if not self.path.exists():
            return None
        header, tensors = self._read(device)
        refuse_other_run(f"{self.path}: state of another polish", header.run, self.run)
        numbers: dict[str, Any] = {name: getattr(header, name) for name in _NUMBERS}
        lists: dict[str, Any] = {name: list(_below(tensors, name).values()) for name in _LISTS}
        position = Position(**lists, **numbers)
        return PolishState(position=position, finished=header.finished, matrices=_below(tensors, "matrices"))

    def _read(self, device: torch.device) -> tuple[_Header, dict[str, Tensor]]:
        remedy = "remove the file to start afresh"
        try:
            with safe_open(regular_file(self.path), framework="pt", device=str(device)) as file:
                text = (file.metadata() or {}).get(_HEADER, "")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise BadInput(f"{self.path}: not a polish's state ({str(error)[:200]}); {remedy}") from None
        where = f"{self.path}: not a polish's state"
        return record_from_text(text, _Header, where=where, kind=_KIND, version=_VERSION, remedy=remedy), tensors


def _below(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors `name`/..., numbered ones in their order."""
    every = {each.removeprefix(f"{name}/"): tensor for each, tensor in tensors.items() if each.startswith(f"{name}/")}
    return {each: every[each] for each in sorted(every, key=lambda each: (len(each), each))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a polish is, as a share, in which part, and the part's held-out error before and as it was last."""

    part: str
    share: float
    error_before: float
    error: float


class Parts:
    """Parts that are fitted in order; with a state file those that were finished before are not fitted again."""

    def __init__(
        self,
        options: PolishOptions,
        ranks: Ranks,
        file: StateFile | None,
        on_progress: Callable[[Progress], None] | None,
        where: torch.device,
    ) -> None:
        self.options, self.ranks, self.file, self.on_progress, self.where = options, ranks, file, on_progress, where
        self._reached = None if file is None else file.load(where)
        self.reports: list[PartReport] = [] if self._reached is None else list(self._reached.finished)
        self._left = {} if self._reached is None else dict(self._reached.matrices)
        self._begun = 0

    def pace(self, count: int) -> StepBudget:
        """Of the part at work, one of so many: an even share of the time that is left."""
        seconds = None
        if self.options.time_s is not None:
            spent = sum(report.seconds for report in self.reports)
            seconds = max(self.options.time_s - spent, 0.0) / (count - len(self.reports))
        return StepBudget(steps=self.options.most_steps, seconds=seconds)

    def was_finished_(self, matrices: Sequence[Matrix]) -> bool:
        """Whether the next part was finished by an attempt before; its matrices are then what that left."""
        self._begun += 1
        if self._begun > len(self.reports):
            return False
        for matrix in matrices:
            matrix.set_(self._left[matrix.name])
        return True

    def _save(self, position: Position) -> None:
        if self.file is not None and self.ranks.rank == 0:
            self.file.save(PolishState(position=position, finished=tuple(self.reports), matrices=self._left))

    def _hear(self, part: str, fit: Fit, position: Position, of: int) -> None:
        if self.on_progress is not None:
            last, first = position.curve[-1], position.curve[0]
            self.on_progress(
                Progress(
                    part=part,
                    share=(len(self.reports) + fit.pace.way(position.step, position.seconds)) / of,
                    error_before=first.error,
                    error=min(last.error, last.averaged),
                )
            )

    def fit_(self, part: str, fit: Fit, *, of: int) -> None:
        """Carry one of so many parts out, on from where an attempt before it was, and report."""
        reached, self._reached = self._reached, None
        with tf32(self.where):
            position = fit.start() if reached is None else reached.position
            fit.run(position, self._save, lambda now: self._hear(part, fit, now, of))
        self.reports.append(position.report(part))
        self._left |= {matrix.name: matrix.values_OK for matrix in fit.matrices}
