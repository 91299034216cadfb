"""The tables of a recipe as types: keys, defaults, and the rules over keys of one table, which its constructor holds.

Imports no torch.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import structs

from corp_deploy.invocation.calibration import CalibrateRun
from corp_deploy.invocation.engine import EngineOptions, ServingOptions
from corp_deploy.invocation.export_choice import ExportOptions, QuantisedOptions
from corp_deploy.invocation.inputs import Decoded, Drawn, InputOptions
from corp_deploy.invocation.option import NEEDED, option, options_of
from corp_deploy.invocation.proof import GateOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.running import BenchOptions, PlanOptions
from corp_deploy.invocation.source import Source
from corp_deploy.invocation.values import FILE, LICENCE, SERVED_NAME, TABLE, TEXT, OneOf
from corp_deploy.spec.trusted_code import file_and_function, is_code
from corp_deploy.store.hub_snapshot import PREFIX
from ground.errors import BadInput
from ground.installed import normalised_licence
from ground.precision import QUANTISED
from ground.quantity import IMAGES

from .recipe_record import keys_alone, record_of, table_of

RELEASE = keys_alone(
    name=option(TEXT, NEEDED, help="What the release is called: in its report, its model card, its signature."),
    version=option(SERVED_NAME, help="What a signature is of, beside the name; `release --sign` wants it."),
)
MODEL = keys_alone(
    model=option(
        TEXT,
        NEEDED,
        help="A directory, `hf:DIR`, `torchvision:NAME`, `module:PATH.py:FUNCTION` (with `release --trust-code`), or a "
        "timm name with `weights`.",
    ),
    kwargs=option(TABLE, help="Arguments for the model's library, as `--model-kwargs` takes them, as a table."),
)
GROUPS = keys_alone(
    groups=option(
        OneOf(("image", "folder", "file")),
        help="Which images belong together, such as crops of one photograph: image (each by itself), folder, or file "
        "(a tar shard is one).",
    ),
    group_labels=option(FILE, help="A .json or .npy file with a label an image, in place of `groups`."),
    attention_system=option(
        OneOf(("whole", "kept")),
        help="CORP's per-image system for preset `corp`: `whole` in one pass, or `kept`, in a second pass for the "
        "dimensions that `reduce.attn` keeps.",
    ),
)
RANGES = keys_alone(
    range_samples=option(IMAGES, help="For int8 and fp8: how many calibration images ranges are computed from.")
)
GRAPHS = options_of(ExportOptions, "precision", "keep_fp32", "graph_input") | options_of(QuantisedOptions)
GRAPHS |= options_of(ExportOptions, "break_fusion")
UNSAID = dict.fromkeys(("rest", "scales", "balance", "weight_bits"))
SAMPLES = keys_alone(
    count=option(
        IMAGES,
        16,
        help="How many held-out inputs the release keeps with their answers; `check` and a server's test replay them.",
    )
)
PACKAGE = keys_alone(
    name=option(SERVED_NAME, help="What the server calls the model; default: made of the release's name.")
)
LICENCES = keys_alone(
    model=option(LICENCE, help="Of the dense model, and so of the reduced one."),
    calibration=option(LICENCE, help="Of the calibration's inputs."),
    held_out=option(LICENCE, help="Of the held-out inputs."),
)
BATCH = keys_alone(batch=option(TEXT, help="Smallest, tuned and largest batch of an engine, such as `1:8:64`."))


class ReleaseTable(table_of(RELEASE)):  # type: ignore[misc]
    """What it is called; a signature is of name and `version`."""


class LicencesTable(table_of(LICENCES)):  # type: ignore[misc]
    """SPDX expressions."""

    def __post_init__(self) -> None:
        for key, expression in structs.asdict(self).items():
            if expression is not None and normalised_licence(expression) is None:
                raise BadInput(f"licences.{key} is {expression!r}, expected {LICENCE}")


class ModelTable(table_of(MODEL, options_of(Source) | MODEL, kwargs={})):  # type: ignore[misc]
    """`model` is a directory as an absolute path, behind hf: where transformers wrote it, a timm name, which goes
    with `weights`, or module:PATH.py:FUNCTION with the absolute path of a user's code.
    """

    def __post_init__(self) -> None:
        try:
            json.dumps(self.kwargs)
        except TypeError:
            raise BadInput(f"model.kwargs is {self.kwargs!r:.200}, expected no dates and times in it") from None
        _ = self.source

    @property
    def source(self) -> Source:
        """The same as commands take it."""
        return record_of(Source, self, "model", name=self.model)

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
    def shown(self) -> str:
        """The model as its user named it, without the folders above it."""
        if self.code is not None:
            return f"module:{self.code.name}:{self.model.rpartition(':')[2]}"
        return self.model if self.directory is None else f"{self.prefix}{self.directory.name}"

    @property
    def prefix(self) -> str:
        """What stands before the directory of another library's model."""
        return PREFIX if self.model.startswith(PREFIX) else ""


def require_more(fitted: int, snapshots: tuple[int, ...]) -> None:
    """Raise BadInput unless more images are fitted to than the last snapshot is of."""
    if snapshots[-1] >= fitted:
        raise BadInput(
            f"calibration.snapshots ends at {snapshots[-1]}, expected less than {fitted}, the images that are "
            "fitted to (without those of calibration.hold_out)"
        )


class CalibrationTable(
    table_of(  # type: ignore[misc]
        options_of(InputOptions, "images"),
        GROUPS,
        options_of(Drawn),
        options_of(CalibrateRun, "batch_size", "device"),
        options_of(Decoded),
        options_of(CalibrateRun, "hold_out", "active_eps", "snapshots"),
        images=NEEDED,
        active_eps=None,
        snapshots=None,
    )
):
    """`snapshots`: after how many images moments are kept too, so that the report tells how many are enough."""

    @property
    def grouping(self) -> str | None:
        """Which images belong together: a word, or a file with labels."""
        return self.groups if self.group_labels is None else str(self.group_labels)

    def __post_init__(self) -> None:
        counts = self.snapshots or ()
        if any(one >= other for one, other in pairwise(counts)):
            raise BadInput(f"calibration.snapshots is {[*counts]}, expected ascending numbers of images")
        fitted = None if self.samples is None else self.samples - (self.hold_out or 0)
        if counts and fitted is not None:
            require_more(fitted, counts)


class HeldOutTable(table_of(options_of(InputOptions, "images", "labels", "samples", "seed"))):  # type: ignore[misc]
    """Images that prove the result: `images`, or those that calibration.hold_out leaves out where there are none;
    `labels` are then of all calibration images.
    """

    def __post_init__(self) -> None:
        if self.images is None and (self.samples is not None or self.seed):
            raise BadInput(
                "held_out.samples and held_out.seed draw from held_out.images, and there are none; give those, or "
                "leave both out: calibration.hold_out says how many are held out, and calibration.seed draws them"
            )


class ReduceTable(table_of(options_of(ReduceOptions))):  # type: ignore[misc]
    """Shares to remove (`mlp`, `attn`, `conv`, `residual`), to keep of the whole model (`macs`, `params`,
    `latency` by the tables of a directory), or the most that may be lost (`within`), and how.
    """

    def __post_init__(self) -> None:
        _ = self.choice

    @property
    def choice(self) -> ReduceOptions:
        """The same as `reduce` takes it."""
        return record_of(ReduceOptions, self, "reduce")


class ExportTable(table_of(RANGES, GRAPHS, precisions=("fp32", "fp16"), **UNSAID)):  # type: ignore[misc]
    """`range_samples`: how many calibration images ranges are computed from."""

    @property
    def quantised(self) -> tuple[str, ...]:
        """The precisions whose ranges are computed from images."""
        return tuple(name for name in self.precisions if name in QUANTISED)

    @property
    def resting_on(self) -> str:
        """The precision of what isn't quantised."""
        return self.rest or ("fp16" if "fp16" in self.precisions else "fp32")

    @property
    def options(self) -> ExportOptions:
        """The same as `export` takes it."""
        return record_of(ExportOptions, self, "export", **({"rest": self.resting_on} if self.quantised else {}))

    def __post_init__(self) -> None:
        _ = self.options
        if self.range_samples is not None and not self.quantised:
            raise BadInput("export.range_samples is for precisions int8 and fp8, which export.precisions does not have")
        if self.quantised and self.resting_on not in self.precisions:
            raise BadInput(
                f"export.precisions has {self.quantised[0]}, which rests on {self.resting_on} and is shipped only "
                f"where it is measured to be faster than that; add {self.resting_on!r} to export.precisions, or choose "
                "export.rest"
            )


class BenchTable(table_of(options_of(PlanOptions), options_of(BenchOptions, "batches", "threads"))):  # type: ignore[misc]
    """How long is measured, and of what."""

    @property
    def plan(self) -> PlanOptions:
        return record_of(PlanOptions, self, "bench")


class GateTable(table_of(options_of(GateOptions))):  # type: ignore[misc]
    """`history`: the directory that keeps the first target's bench record of every release."""


class SamplesTable(table_of(SAMPLES)):  # type: ignore[misc]
    """The held-out inputs that are kept."""


class PackageTable(table_of(PACKAGE, options_of(ServingOptions, "labels", "allow_failed"))):  # type: ignore[misc]
    """The model repository that is written where it is named."""


class TargetTable(
    table_of(  # type: ignore[misc]
        BATCH,
        options_of(EngineOptions, "sm"),
        options_of(GateOptions, "rules"),
        options_of(EngineOptions, "precision", "sparse"),
    )
):
    """One of [targets], which may leave out what follows from the other tables."""
