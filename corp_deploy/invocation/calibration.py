"""Options of a calibration: statistics, held-out inputs, forward passes, and outputs. Torch is imported on use."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from calib.active import ACTIVE_EPS
from ground.errors import BadInput
from ground.quantity import BATCH, GIGABYTES, IMAGES, MAGNITUDE, SHARE_REMOVED, quoted

from .merging import MergedStatistics
from .method_choice import MULTIPLES
from .option import NEEDED, PathLike, Record, option
from .table import CALIBRATE, CALIBRATE_BY
from .values import FILE, ListOf, ParsedText, Repeated

if TYPE_CHECKING:
    from calib.inputs import InputSet
    from corp_deploy.reduction.calibrate import Statistics
    from corp_deploy.reduction.moments_files import CalibrationRequest

Inputs = TypeVar("Inputs", bound="InputSet")


def parse_shard(text: str) -> tuple[int, int]:
    """Return the number of a shard and the number of all. Raises BadInput for other texts than 1/4 to 4/4."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise BadInput(f"--shard {quoted(text)}: expected I/N with I from 1 to N, such as 1/4")
    return index, count


def _checked_shard(text: str) -> str:
    parse_shard(text)
    return text


SHARD = ParsedText(
    span="I/N", expected="I/N with I from 1 to N", kind=str, read=_checked_shard, pattern="[0-9]+/[0-9]+"
)


@dataclass(frozen=True, kw_only=True)
class StatisticsOptions(Record, heading="Statistics"):
    """The statistics that a calibration collects, and the sites that it collects them at.

    CORP's per-image system (`attention_system`) covers all dimensions of heads, or only those kept at the sparsities
    `attn`.

    Raises BadInput for `attention_system` without `attention`, `attn` without `attention_system`, and `first_pass` or
    `align` without `attn`.
    """

    sites: Sequence[str] = option(Repeated(), (), help="Only sites that fit this pattern, such as 'blocks.3.*'.")
    attention: bool = option(default=True, help="Calibrate attention too, or MLPs only.")
    attention_system: bool = option(
        default=False, help="Also take CORP's per-image system (eq. 15); --preset corp needs it."
    )
    residual: bool = option(
        default=False,
        help="With --patch-memory: also calibrate the layers that read residual streams, which reduce --residual "
        "needs; without --patch-memory they always are.",
    )
    active_eps: float = option(
        MAGNITUDE,
        ACTIVE_EPS,
        help="Entries of a larger magnitude count as active, for reduce --select active and inspect redundancy.",
    )
    patch_memory: float | None = option(
        GIGABYTES,
        help="GB for all sums: in the largest convolutions only patches of the channels with the largest weights "
        "are summed, and the other channels are removed first. Default: patches of all channels.",
    )
    attn: Sequence[float] = option(
        ListOf(SHARE_REMOVED, "0.5,0.75"),
        (),
        help="Collect the per-image system only for the dimensions that reduce --attn S keeps at these sparsities: a "
        "second pass, far less memory.",
    )
    first_pass: PathLike | None = option(
        FILE,
        typed="moments",
        help="Moments of this model that rank the dimensions for --attn; without them a first pass does.",
    )
    align: Mapping[str, int] | None = option(
        MULTIPLES, help="Multiples that the widths of --attn are rounded to, the same as in reduce; default head=16."
    )
    dtype: Literal["float32", "tf32", "bfloat16"] = option(
        default="float32",
        help="Precision of the forward pass; the statistics are float32 products and float64 sums in any case. "
        + CALIBRATE.help("dtype"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_system and not self.attention:
            raise BadInput("--attention-system and --no-attention exclude each other; give one")
        if self.attn and not self.attention_system:
            raise BadInput("--attn restricts the per-image system; give --attention-system with it")
        if not self.attn and (self.first_pass is not None or self.align is not None):
            raise BadInput("--moments and --align belong to --attention-system --attn S; give them together")

    @property
    def statistics(self) -> "Statistics":
        from corp_deploy.reduction.calibrate import Statistics

        return Statistics(
            patterns=tuple(self.sites),
            attention=self.attention,
            attention_system=self.attention_system,
            precision=self.dtype,
            residual=self.residual,
            patch_bytes=None if self.patch_memory is None else int(self.patch_memory * 1e9),
            active_eps=self.active_eps,
        )


@dataclass(frozen=True, kw_only=True)
class PassOptions(Record, heading="The pass"):
    """The held-out inputs and the groups, and batch size, device and snapshots of the pass over the other inputs."""

    hold_out: int | None = option(
        IMAGES,
        help="Hold out N images, drawn by --seed, and write their moments beside OUTPUT, with .held-out before its "
        "suffix.",
    )
    groups: str | None = option(
        ParsedText(span="TEXT", expected="a text", kind=str, read=str),
        help="Which images belong together, such as crops of one photograph: image (each by itself), folder, file "
        "(a tar shard or parquet file is one), or a .json or .npy file with one label per image. Default: by names "
        "such as a_crop2.png or clip/frame_01.png, or by near-duplicates, if a tenth of the images show it; none looks "
        "for neither.",
    )
    batch_size: int = option(BATCH, 32, help="Images in one forward pass.")
    device: Literal["cpu", "cuda"] = option(default="cpu", help="Where the model runs.")
    snapshots: Sequence[int] = option(
        ListOf(IMAGES, "100,500,1000"),
        (),
        help="Increasing numbers of images: the same pass also writes the moments of that many first images, with "
        ".100 and so on before OUTPUT's suffix. With --samples the images come in an order drawn by --seed.",
    )

    def order_for_snapshots(self, source: Inputs, *, samples: int | None, seed: int) -> Inputs:
        """Return the inputs, shuffled by `seed` if `samples` is set and there are snapshots, else unchanged.

        A snapshot covers the first inputs, and drawn inputs are in the order of the data set.
        """
        from calib.inputs import shuffle_inputs

        return shuffle_inputs(source, seed=seed) if self.snapshots and samples is not None else source


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(PassOptions, MergedStatistics, StatisticsOptions):
    """All options of `calibrate` in Python. Raises BadInput for one without effect on the device or on merging."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_ignored(self.non_default)

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        CALIBRATE.refuse([("", self.device)], options)
        super().refuse_ignored(options)

    def request(self, *, seed: int) -> "CalibrationRequest":
        from corp_deploy.reduction.moments_files import CalibrationRequest, Restriction

        first, head = None if self.first_pass is None else Path(self.first_pass), (self.align or {}).get("head")
        return CalibrationRequest(
            statistics=self.statistics,
            restriction=Restriction(sparsities=tuple(self.attn), align_head=head, first=first) if self.attn else None,
            batch_size=self.batch_size,
            device=self.device,
            seed=seed,
            hold_out=self.hold_out,
            groups=self.groups,
        )


@dataclass(frozen=True)
class CalibrateFiles(Record):
    """The moments file that `calibrate` writes, a positional parameter in Python."""

    output: PathLike = option(FILE, NEEDED, help="Moments file to write (.safetensors).")


@dataclass(frozen=True, kw_only=True)
class CalibrateRun(CalibrateOptions):
    """All options of the command `calibrate`: those in Python, saving its state, and calibration block by block."""

    checkpoint_every: int | None = option(
        IMAGES, help="Save the state every N images; the same command resumes from it."
    )
    shard: str | None = option(
        SHARD, help="Calibrate the I-th of N shares of the images, such as 1/4; calibrate --merge adds the files."
    )
    sequential: bool = option(
        default=False,
        help="For a decoder (hf:DIR): block by block, with one block's weights in memory; after an interruption "
        "the same command resumes.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard is not None and (self.hold_out is not None or self.snapshots):
            other = "--hold-out" if self.hold_out is not None else "--snapshots"
            raise BadInput(f"--shard and {other} exclude each other: a share has neither all images nor the first ones")

    def own_shard(self, source: Inputs) -> Inputs:
        """Return the inputs of this shard, or all. Raises BadInput if there are fewer inputs than shards."""
        if self.shard is None:
            return source
        index, count = parse_shard(self.shard)
        if source.count < count:
            raise BadInput(f"--shard {self.shard}: got {source.count} {source.noun}, fewer than the {count} shards")
        return source.subset(range(source.count * (index - 1) // count, source.count * index // count))

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        super().refuse_ignored(options)
        CALIBRATE_BY.refuse([("", "blocks" if self.sequential else "whole")], options)
