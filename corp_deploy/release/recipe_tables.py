"""The tables of a recipe as types: keys, defaults, and the rules over keys of one table, which its constructor holds.

Imports no torch.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from corp_deploy.families.outputs import Outputs
from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.families.trusted_code import file_and_function, is_code
from corp_deploy.store.hub_snapshot import PREFIX
from ground.errors import BadInput
from perf.stats.stats import DEFAULT_CONFIDENCE

from . import recipe_values
from .recipe_table import Table


class ReleaseTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`version` is what a signature is of, beside the name."""

    name: recipe_values.Text
    version: recipe_values.ServedName | None = None


class LicencesTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SPDX expressions for the model, the dense one's and so the reduced one's, and for the images."""

    model: recipe_values.Licence | None = None
    calibration: recipe_values.Licence | None = None
    held_out: recipe_values.Licence | None = None


class ModelTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` is a directory as an absolute path, behind hf: where transformers wrote it, a timm name, which goes
    with `weights`, or module:PATH.py:FUNCTION with the absolute path of a user's code.
    """

    model: recipe_values.Text
    weights: recipe_values.Location | None = None
    kwargs: recipe_values.Arguments = msgspec.field(default_factory=dict)
    ema: recipe_values.Flag | None = None
    mean: recipe_values.Means | None = None
    std: recipe_values.Deviations | None = None
    crop_pct: recipe_values.ShareKept | None = None
    interpolation: recipe_values.Interpolation | None = None
    crop_mode: recipe_values.CropMode | None = None
    outputs: recipe_values.OutputNames | None = None

    def __post_init__(self) -> None:
        try:
            json.dumps(self.kwargs)
        except TypeError:
            raise BadInput(f"model.kwargs is {self.kwargs!r:.200}, expected no dates and times in it") from None
        try:
            _ = self.named_outputs
        except BadInput as error:
            raise BadInput(f"model.{error}") from None

    @property
    def named_outputs(self) -> Outputs | None:
        """What the model gives by name, None for its own output."""
        return None if self.outputs is None else Outputs(self.outputs)

    @property
    def code(self) -> Path | None:
        """The file of a user's code that makes the model; a recipe alone never has it run."""
        return file_and_function(self.model)[0] if is_code(self.model) else None

    @property
    def trust(self) -> dict[str, Any]:
        """What every command that makes the model is told of it."""
        return {} if self.code is None else {"trust_code": True}

    @property
    def directory(self) -> Path | None:
        path = Path(self.model.removeprefix(PREFIX))
        return path if path.is_absolute() else None

    @property
    def prefix(self) -> str:
        """What stands before the directory of another library's model."""
        return PREFIX if self.model.startswith(PREFIX) else ""

    @property
    def preprocessing(self) -> Preprocessing:
        """What of the preprocessing is set."""
        return Preprocessing(
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            crop_mode=self.crop_mode,
        )


def require_more(fitted: int, snapshots: tuple[int, ...]) -> None:
    """Raise BadInput unless more images are fitted to than the last snapshot is of."""
    if snapshots[-1] >= fitted:
        raise BadInput(
            f"calibration.snapshots ends at {snapshots[-1]}, expected less than {fitted}, the images that are "
            "fitted to (without those of calibration.hold_out)"
        )


class CalibrationTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`snapshots`: after how many images moments are kept too, so that the report tells how many are enough."""

    images: recipe_values.Location
    samples: recipe_values.Images | None = None
    seed: recipe_values.Seed = 0
    batch_size: recipe_values.Batch = 32
    device: recipe_values.Device = "cpu"
    workers: recipe_values.Workers = 0
    max_bad: recipe_values.BadImages = 0
    hold_out: recipe_values.Images | None = None
    groups: recipe_values.Groups | None = None
    group_labels: recipe_values.Location | None = None
    attention_system: recipe_values.AttentionSystem | None = None
    active_eps: recipe_values.Magnitude | None = None
    snapshots: recipe_values.Snapshots | None = None

    def __post_init__(self) -> None:
        counts = self.snapshots or ()
        if any(one >= other for one, other in pairwise(counts)):
            raise BadInput(f"calibration.snapshots is {[*counts]}, expected ascending numbers of images")
        fitted = None if self.samples is None else self.samples - (self.hold_out or 0)
        if counts and fitted is not None:
            require_more(fitted, counts)


class HeldOutTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images that prove the result: `images`, or those that calibration.hold_out leaves out where there are none;
    `labels` are then of all calibration images.
    """

    images: recipe_values.Location | None = None
    labels: recipe_values.Location | None = None
    samples: recipe_values.Images | None = None
    seed: recipe_values.Seed = 0

    def __post_init__(self) -> None:
        if self.images is None and (self.samples is not None or self.seed):
            raise BadInput(
                "held_out.samples and held_out.seed draw from held_out.images, and there are none; give those, or "
                "leave both out: calibration.hold_out says how many are held out, and calibration.seed draws them"
            )


class BenchTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batches: recipe_values.Batches = (1, 8, 32)
    time_limit_s: recipe_values.Seconds = 20.0
    half_width: recipe_values.ShareKept = 0.01
    block_ms: recipe_values.Milliseconds = 25.0
    min_rounds: recipe_values.Rounds = 16
    threads: recipe_values.Threads | None = None
    audit: recipe_values.Flag = False


class GateTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`history`: the directory that keeps the first target's bench record of every release."""

    fail_if: recipe_values.Texts = ()
    confidence: recipe_values.Confidence = DEFAULT_CONFIDENCE
    history: recipe_values.Location | None = None


class SamplesTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: recipe_values.Images = 16


class PackageTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: recipe_values.ServedName | None = None
    labels: recipe_values.Location | None = None


class TargetTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of [targets], which may leave out what follows from the other tables."""

    precision: recipe_values.Precision | None = None
    batch: recipe_values.Text | None = None
    sms: recipe_values.Texts = ()
    sparse: recipe_values.Flag = False
    fail_if: recipe_values.Texts = ()
