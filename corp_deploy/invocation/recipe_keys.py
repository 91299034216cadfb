"""Keys of a recipe that no command has an option for, or that a recipe takes in its own form. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ground.quantity import IMAGES

from .option import NEEDED, Record, option
from .values import FILE, LICENCE, PATH, SERVED_NAME, TABLE, TEXT, Repeated


@dataclass(frozen=True, kw_only=True)
class ReleaseKeys(Record):
    """What a release is called."""

    name: str = option(TEXT, NEEDED, help="What the release is called: in its report, its model card, its signature.")
    version: str | None = option(
        SERVED_NAME, help="What a signature is of, beside the name; `release --sign` wants it."
    )


@dataclass(frozen=True, kw_only=True)
class ModelKeys(Record):
    """Which model, beside what Source declares."""

    model: str = option(
        TEXT,
        NEEDED,
        help="A directory, `hf:DIR`, `torchvision:NAME`, `module:PATH.py:FUNCTION` (with `release --trust-code`), or a "
        "timm name with `weights`.",
    )
    kwargs: Mapping[str, Any] | None = option(
        TABLE, help="Arguments for the model's library, as `--model-kwargs` takes them, as a table."
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationKeys(Record):
    """Which images, and which of them belong together."""

    images: Path = option(
        PATH,
        NEEDED,
        help="A folder of images, or .npy / .npz / .safetensors with float32 [N,3,H,W] that is already preprocessed.",
    )
    groups: Literal["image", "folder", "file"] | None = option(
        help="Which images belong together, such as crops of one photograph: image (each by itself), folder, or file "
        "(a tar shard is one).",
    )
    group_labels: Path | None = option(FILE, help="A .json or .npy file with a label an image, in place of `groups`.")
    attention_system: Literal["whole", "kept"] | None = option(
        help="CORP's per-image system for preset `corp`: `whole` in one pass, or `kept`, in a second pass for the "
        "dimensions that `reduce.attn` keeps.",
    )


@dataclass(frozen=True, kw_only=True)
class ExportKeys(Record):
    """How many images ranges are computed from."""

    range_samples: int | None = option(
        IMAGES, help="For int8 and fp8: how many calibration images ranges are computed from."
    )


@dataclass(frozen=True, kw_only=True)
class MetricKeys(Record):
    """What the commands of measures read."""

    metric_files: Sequence[Path] = option(
        Repeated(each=FILE),
        (),
        help="Files that the commands of `metric` name; their digests stand in the record.",
    )


@dataclass(frozen=True, kw_only=True)
class SampleKeys(Record):
    """What a release keeps to be replayed."""

    count: int = option(
        IMAGES,
        16,
        help="How many held-out inputs the release keeps with their answers; `check` and a server's test replay them.",
    )


@dataclass(frozen=True, kw_only=True)
class PackageKeys(Record):
    """What a server calls the model."""

    name: str | None = option(SERVED_NAME, help="What the server calls the model; default: made of the release's name.")


@dataclass(frozen=True, kw_only=True)
class LicenceKeys(Record):
    """SPDX expressions for the model, the dense one's and so the reduced one's, and for the images."""

    model: str | None = option(LICENCE, help="Of the dense model, and so of the reduced one.")
    calibration: str | None = option(LICENCE, help="Of the calibration's inputs.")
    held_out: str | None = option(LICENCE, help="Of the held-out inputs.")


@dataclass(frozen=True, kw_only=True)
class TargetKeys(Record):
    """What shapes a target's engine beside what EngineOptions declares."""

    batch: str | None = option(TEXT, help="Smallest, tuned and largest batch of an engine, such as `1:8:64`.")
