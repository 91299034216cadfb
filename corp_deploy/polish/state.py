"""The state of a polish on disk: finished sublayers, from which an interrupted polish continues."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calib.calibrate import refuse_other_run
from ground.errors import BadInput
from ground.files import regular_file, replacing
from ground.records import record_from_text

from .newton import PartReport

_HEADER = "corp-deploy"
_KIND, _VERSION = "corp-deploy/polish-state", 1


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = _KIND
    version: int = _VERSION
    run: dict[str, str]
    finished: tuple[PartReport, ...]


def state_beside(directory: Path) -> Path:
    """Return the path of the polish's state for a model that is written to a directory."""
    return directory.absolute().with_name(f"{directory.absolute().name}.polish-unfinished.safetensors")


@dataclass(slots=True, kw_only=True)
class PolishState:
    """The reports of finished sublayers by name, and by layer name the weight and bias side by side [O,D]."""

    finished: dict[str, PartReport] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """The file of a state; `run` names the models, inputs and options, which must be equal to continue."""

    path: Path
    run: Mapping[str, str]

    def save(self, state: PolishState) -> None:
        """Write the state and `run` to the file, which is replaced in one step."""
        header = _Header(run=dict(self.run), finished=tuple(state.finished.values()))
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state.matrices.items()}
        with replacing(self.path) as temporary:
            save_file(tensors, temporary, metadata={_HEADER: json.dumps(msgspec.to_builtins(header))})

    def load(self, device: torch.device) -> PolishState:
        """Return the saved state, or an empty one without a file; raise BadInput for another kind of file or run."""
        if not self.path.exists():
            return PolishState()
        where, remedy = f"{self.path}: not a polish's state", "remove the file to start afresh"
        try:
            with safe_open(regular_file(self.path), framework="pt", device=str(device)) as file:
                text = (file.metadata() or {}).get(_HEADER, "")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise BadInput(f"{where} ({str(error)[:200]}); {remedy}") from None
        header = record_from_text(text, _Header, where=where, kind=_KIND, version=_VERSION, remedy=remedy)
        refuse_other_run(f"{self.path}: state of another polish", header.run, self.run)
        return PolishState(finished={report.part: report for report in header.finished}, matrices=tensors)
