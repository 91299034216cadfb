"""The trials of a sweep on disk, from which a stopped sweep continues.

trials/NAME/reduced/     the reduced model, for as long as it is needed
trials/NAME/score.json   its cost and its errors against the dense model
trials/NAME/engine.json  the figures of its engine
trials/NAME/timing.json  its speeds, from the raw samples in bench.json beside it
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from ground.effort import Effort
from ground.errors import BadInput
from ground.files import write_json
from ground.records import json_from_record, record_from_file

from .sweep_points import EngineFigures, SpeedAtBatch, SweepPoint

REDUCED, BENCH = "reduced", "bench.json"
KIND = "corp-deploy/sweep-trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """One model to try: a preset at uniform sparsities, or with a budget, the share of the dense MACs to keep.

    `knobs` are the options that differ from the preset; `moments` is the position of the sweep's moments to use.
    """

    preset: str
    method: Method
    budget: float | None = None
    knobs: Mapping[str, str] | None = None
    moments: int = 0

    @property
    def share(self) -> float:
        """The largest of the sparsities."""
        method = self.method
        return max(method.mlp_sparsity or 0.0, method.attention_sparsity or 0.0, method.conv_sparsity or 0.0)

    @property
    def slug(self) -> str:
        """The request as the name of a folder."""
        shares = {
            "macs": self.budget,
            "mlp": self.method.mlp_sparsity,
            "attn": self.method.attention_sparsity,
            "conv": self.method.conv_sparsity,
        }
        words = [self.preset, *(self.knobs or {}).values()]
        words += [f"{name}{share:g}" for name, share in shares.items() if share]
        return re.sub(r"[^\w.-]+", "-", "-".join(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A result of a trial; `key` is the digest of the values that decide it."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(TrialResult):
    """A trial's point without its engine and speeds."""

    point: SweepPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuilt(TrialResult):
    """The figures of a trial's engine, and the time of its build."""

    figures: EngineFigures
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(TrialResult):
    """The speeds of a trial, and the size of the timed file."""

    speeds: tuple[SpeedAtBatch, ...]
    size_bytes: int | None
    effort: Effort


FILES: Mapping[type[TrialResult], str] = {Scores: "score.json", EngineBuilt: "engine.json", Timing: "timing.json"}
Found = TypeVar("Found", bound=TrialResult)


def digest_of_values(**what: Any) -> str:
    """Return a digest of the values that decide a result."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFolder:
    """The files of one trial; a file that can't be read or belongs to another trial counts as missing."""

    path: Path
    key: str

    def read(self, kind: type[Found], key: str) -> Found | None:
        path = self.path / FILES[kind]
        if not path.is_file():
            return None
        try:
            record = record_from_file(path, kind, kind=KIND)
        except BadInput:
            return None
        return record if record.key == key else None

    def write(self, record: TrialResult) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / FILES[type(record)], {"kind": KIND, "version": 1, **json_from_record(record)})

    def scores(self) -> SweepPoint | None:
        found = self.read(Scores, self.key)
        return None if found is None else found.point

    @property
    def model(self) -> Path:
        return self.path / REDUCED

    def reduced(self) -> Checkpoint | None:
        """Load the reduced model, or return None if it isn't complete or is another trial's."""
        try:
            checkpoint = load_checkpoint(self.model)
        except BadInput:
            return None
        return checkpoint if checkpoint.lineage.get("sweep_trial") == self.key else None

    def has_reduced(self) -> bool:
        return (self.model / "config.json").is_file() and self.reduced() is not None
