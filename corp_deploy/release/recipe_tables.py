"""The tables of a recipe as records, whose constructors check the keys of one table together. Imports no torch.

Tables whose keys are all options of an operation ([reduce], [bench]) have the operation's own record in invocation.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from corp_deploy.invocation.calibration import CalibrateRun, PassOptions
from corp_deploy.invocation.engine import EngineOptions, ServingOptions
from corp_deploy.invocation.export_choice import ExportOptions
from corp_deploy.invocation.input_choice import Decoded, Drawn, InputOptions
from corp_deploy.invocation.option import NEEDED, Record, declared, option
from corp_deploy.invocation.proof import GateOptions
from corp_deploy.invocation.source import ModelSource
from corp_deploy.invocation.values import FILE, LICENCE, SERVED_NAME, TABLE, TEXT, OneOf
from corp_deploy.spec.trusted_code import file_and_function, is_code
from corp_deploy.store.hub_snapshot import PREFIX
from ground.errors import BadInput
from ground.installed import normalised_licence
from ground.places import Place
from ground.quantity import IMAGES


@dataclass(frozen=True, kw_only=True)
class ReleaseTable(Record):
    """The table [release]: the name and version of the release, which a signature covers."""

    name: str = option(TEXT, NEEDED, help="Name of the release: in its report, its model card, its signature.")
    version: str | None = option(
        SERVED_NAME, help="Version that the signature covers, with the name; `release --sign` needs it."
    )


@dataclass(frozen=True, kw_only=True)
class LicencesTable(Record):
    """The table [licences]: SPDX expressions for the model and the data."""

    model: str | None = option(LICENCE, help="Licence of the dense model, and so of the reduced one.")
    calibration: str | None = option(LICENCE, help="Licence of the calibration set.")
    held_out: str | None = option(LICENCE, help="Licence of the held-out set.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, expression in self.values.items():
            if expression is not None and normalised_licence(expression) is None:
                raise BadInput(f"licences.{key} is {expression!r}, expected {LICENCE}")


@dataclass(frozen=True, kw_only=True)
class ModelTable(ModelSource):
    """The table [model]: a ModelSource whose paths are absolute.

    `name` is a directory of corp-deploy or a timm snapshot, hf:DIR of transformers, module:PATH.py:FUNCTION, or a name
    of timm or torchvision, which needs `weights`.
    """

    name: str = option(
        TEXT,
        NEEDED,
        in_recipe="model",
        help="A directory, `hf:DIR`, `torchvision:NAME`, `module:PATH.py:FUNCTION` (with `release --trust-code`), or a "
        "timm name with `weights`.",
    )
    kwargs: Mapping[str, Any] | None = option(
        TABLE,
        typed="model_kwargs",
        help="Arguments for the model's library, as `--model-kwargs` takes them, as a table.",
    )

    def __post_init__(self) -> None:
        try:
            json.dumps(self.kwargs)
        except TypeError:
            raise BadInput(f"model.kwargs is {self.kwargs!r:.200}, expected no dates and times in it") from None
        super().__post_init__()

    @property
    def code(self) -> Path | None:
        """The file of a user's code that makes the model, None for other models."""
        return file_and_function(self.name)[0] if is_code(self.name) else None

    @property
    def trust(self) -> dict[str, Any]:
        return {} if self.code is None else {"trust_code": True}

    @property
    def directory(self) -> Path | None:
        path = Path(self.name.removeprefix(PREFIX))
        return path if path.is_absolute() else None

    @property
    def shown(self) -> str:
        if self.code is not None:
            return f"module:{self.code.name}:{self.name.rpartition(':')[2]}"
        return self.name if self.directory is None else f"{self.prefix}{self.directory.name}"

    @property
    def prefix(self) -> str:
        return PREFIX if self.name.startswith(PREFIX) else ""


def require_more(fitted: int, snapshots: Sequence[int]) -> None:
    """Raise BadInput unless `fitted`, the number of images that are fitted to, exceeds the last of `snapshots`."""
    if snapshots[-1] >= fitted:
        raise BadInput(
            f"calibration.snapshots ends at {snapshots[-1]}, expected less than {fitted}, the images that are "
            "fitted to (without those of calibration.hold_out)"
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationTable(Decoded, PassOptions, Drawn):
    images: Place = declared(InputOptions, "images", NEEDED)
    groups: str | None = option(
        OneOf(("image", "folder", "file", "none")),
        help="Which images belong together, such as crops of one photograph: image (each by itself), folder, or file "
        "(a tar shard or parquet file is one). Default: by names such as a_crop2.png, or by near-duplicates, if a "
        "tenth of the images show it; none looks for neither.",
    )
    group_labels: Path | None = option(
        FILE, help="A .json or .npy file with one label per image, in place of `groups`."
    )
    attention_system: str | None = option(
        OneOf(("whole", "kept")),
        help="CORP's per-image system for preset `corp`: `whole` in one pass, or `kept`, in a second pass for the "
        "dimensions that `reduce.attn` keeps.",
    )
    active_eps: float | None = declared(CalibrateRun, "active_eps", None)

    @property
    def grouping(self) -> str | None:
        """The value of `calibrate --groups`: image, folder, file, or the path of a file with labels."""
        return self.groups if self.group_labels is None else str(self.group_labels)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(one >= other for one, other in pairwise(self.snapshots)):
            raise BadInput(f"calibration.snapshots is {[*self.snapshots]}, expected ascending numbers of images")
        if self.snapshots and self.samples is not None:
            require_more(self.samples - (self.hold_out or 0), self.snapshots)


@dataclass(frozen=True, kw_only=True)
class HeldOutTable(Drawn):
    """The table [held_out]: the images that prove the result.

    Without `images` those of calibration.hold_out prove the result, and `labels` are those of all calibration images.
    """

    images: Place | None = declared(InputOptions, "images", None)
    labels: Path | None = declared(InputOptions, "labels", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images is None and (self.samples is not None or self.seed):
            raise BadInput(
                "held_out.samples and held_out.seed draw from held_out.images, and there are none; give those, or "
                "leave both out: calibration.hold_out says how many are held out, and calibration.seed draws them"
            )


@dataclass(frozen=True, kw_only=True)
class ExportTable(ExportOptions):
    """The table [export]; with INT8 or FP8, the default of `rest` is fp16 if it is among the precisions, else fp32."""

    precision: str | Sequence[str] = declared(ExportOptions, "precision", ("fp32", "fp16"))
    rest: str | None = declared(ExportOptions, "rest", None)  # type: ignore[assignment]
    range_samples: int | None = option(
        IMAGES, help="For int8 and fp8: how many calibration images ranges are computed from."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range_samples is not None and not self.quantised:
            raise BadInput("export.range_samples is for precisions int8 and fp8, which export.precisions does not have")
        if not self.quantised:
            return
        object.__setattr__(self, "rest", self.rest or ("fp16" if "fp16" in self.precisions else "fp32"))
        if self.rest not in self.precisions:
            raise BadInput(
                f"export.precisions has {self.quantised[0]}, which rests on {self.rest} and is shipped only "
                f"where it is measured to be faster than that; add {self.rest!r} to export.precisions, or choose "
                "export.rest"
            )


@dataclass(frozen=True, kw_only=True)
class GateTable(GateOptions):
    """The table [gate]; `history` keeps the first target's bench record of every release."""

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Refuse nothing; Recipe refuses options without rules, since targets have rules, too."""


@dataclass(frozen=True, kw_only=True)
class SamplesTable(Record):
    """The table [samples]: the number of held-out inputs that the release keeps."""

    count: int = option(
        IMAGES,
        16,
        help="How many held-out inputs the release keeps with their outputs; `check` and a server's test replay them.",
    )


@dataclass(frozen=True, kw_only=True)
class PackageTable(Record):
    """The table [package]: the model repository, which is written only if `name` is set."""

    name: str | None = option(SERVED_NAME, help="Name of the model on the server; without it no repository is written.")
    labels: Path | None = declared(ServingOptions, "labels", None)
    allow_failed: bool = declared(ServingOptions, "allow_failed", False)


@dataclass(frozen=True, kw_only=True)
class TargetTable(Record):
    """A table [targets.NAME]; keys that are not set get their values from [export] and [bench]."""

    batch: str | None = option(TEXT, help="Smallest, tuned and largest batch of an engine, such as `1:8:64`.")
    sm: tuple[str, ...] = declared(EngineOptions, "sm", ())
    rules: tuple[str, ...] = declared(GateOptions, "rules", ())
    precision: str | None = declared(EngineOptions, "precision", None)
    sparse: bool = declared(EngineOptions, "sparse", False)
