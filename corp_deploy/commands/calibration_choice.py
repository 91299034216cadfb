"""What calibrate takes: which statistics, of which parts of the images, and how the model is run over them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calib.active import ACTIVE_EPS
from corp_deploy.invocation.table import CALIBRATE
from ground.quantities import GIGABYTES, IMAGES, MAGNITUDE, SHARE_REMOVED

from .input_choice import InputChoice
from .numbers import Alignment, Number, Numbers
from .options import FILE, batch_size_option, value_options

if TYPE_CHECKING:
    from calib.collect import Precision
    from calib.input_set import InputSet
    from corp_deploy.reduction.calibrate import Statistics
    from corp_deploy.reduction.moments_files import Restriction
    from corp_deploy.store.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsChoice:
    """Which statistics of which sites; CORP's per-image system whole, or for what some shares removed leave of it.

    Raises UsageError where one asks for what another excludes or what it belongs to is not given.
    """

    patterns: tuple[str, ...]
    no_attention: bool
    attention_system: bool
    residual: bool
    patch_memory: float | None
    active_eps: float
    attn: tuple[float, ...] | None
    first_pass: Path | None
    align: dict[str, int] | None
    dtype: "Precision"

    def __post_init__(self) -> None:
        if self.attention_system and self.no_attention:
            raise click.UsageError("--attention-system and --no-attention exclude each other; give one")
        if self.attn is not None and not self.attention_system:
            raise click.UsageError("--attn restricts the per-image system; give --attention-system with it")
        if self.attn is None and (self.first_pass is not None or self.align is not None):
            raise click.UsageError("--moments and --align belong to --attention-system --attn S; give them together")

    def statistics(self) -> "Statistics":
        from corp_deploy.reduction.calibrate import Statistics

        return Statistics(
            patterns=self.patterns,
            attention=not self.no_attention,
            attention_system=self.attention_system,
            precision=self.dtype,
            residual=self.residual,
            patch_bytes=None if self.patch_memory is None else int(self.patch_memory * 1e9),
            active_eps=self.active_eps,
        )

    def restriction(self) -> "Restriction | None":
        from corp_deploy.reduction.moments_files import Restriction

        if self.attn is None:
            return None
        return Restriction(sparsities=self.attn, align_head=(self.align or {}).get("head"), first=self.first_pass)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsChoice:
    """How the images are parted: how many are held out, and which belong together (see --groups)."""

    hold_out: int | None
    groups: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassChoice:
    """How the model is run over the images, after how many of them the state is saved (None: never), and after which
    numbers moments are written.
    """

    batch_size: int
    device: str
    checkpoint_every: int | None
    snapshots: tuple[int, ...]
    sequential: bool

    def source(self, inputs: InputChoice, checkpoint: "Checkpoint") -> "InputSet":
        """The inputs; drawn ones in an order drawn too, where their first ones have moments of their own."""
        from calib.input_set import shuffled

        source = inputs.open(checkpoint)
        return shuffled(source, seed=inputs.seed) if self.snapshots and inputs.samples is not None else source


statistics_options = value_options(
    "statistics",
    StatisticsChoice,
    click.option("--sites", "patterns", multiple=True, help="Only sites that fit this pattern, such as 'blocks.3.*'."),
    click.option("--no-attention", is_flag=True, help="Take MLP statistics only."),
    click.option(
        "--attention-system", is_flag=True, help="Also take CORP's per-image system (eq. 15); --preset corp needs it."
    ),
    click.option(
        "--residual",
        is_flag=True,
        help="With --patch-memory also take what reads residual streams, which reduce --residual needs; without "
        "--patch-memory that is always taken.",
    ),
    click.option(
        "--active-eps",
        type=Number(MAGNITUDE),
        default=ACTIVE_EPS,
        show_default=True,
        help="What counts as active for reduce --select active and redundancy: entries of a larger magnitude.",
    ),
    click.option(
        "--patch-memory",
        type=Number(GIGABYTES),
        default=None,
        help="GB that all sums may take: patches of the largest convolutions are summed of fewer channels, those of "
        "the largest weights; the others are the first to be removed. Default: patches of all channels.",
    ),
    click.option(
        "--attn",
        type=Numbers(SHARE_REMOVED, example="0.5,0.75"),
        default=None,
        help="Take that system only for what reduce --attn S keeps at these shares: a second pass, far less memory.",
    ),
    click.option(
        "--moments",
        "first_pass",
        type=FILE,
        default=None,
        help="Moments of this model that rank the dimensions for --attn; without them a first pass is made.",
    ),
    click.option(
        "--align", type=Alignment(), default=None, help="As reduce will round the widths of --attn; default head=16."
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "tf32", "bfloat16"]),
        default="float32",
        show_default=True,
        help="Precision of the forward pass; the statistics are float32 products and float64 sums in any case. "
        + CALIBRATE.help("dtype"),
    ),
)
parts_options = value_options(
    "parts",
    PartsChoice,
    click.option(
        "--hold-out",
        type=Number(IMAGES),
        default=None,
        help="Leave N images out, drawn by --seed, and write theirs to OUTPUT's name with .held-out before its suffix.",
    ),
    click.option(
        "--groups",
        default=None,
        help="Which images belong together, as crops of one photograph do: image (each its own), folder, file (a tar "
        "shard is one), or a .json or .npy file with a label an image.",
    ),
)
pass_options = value_options(
    "passes",
    PassChoice,
    batch_size_option,
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the model runs."
    ),
    click.option(
        "--checkpoint-every", type=Number(IMAGES), default=None, help="Save the state every N images, to go on from."
    ),
    click.option(
        "--snapshots",
        type=Numbers(IMAGES, example="100,500,1000"),
        default=(),
        help="Ascending numbers of images after which the same pass writes their moments too, to OUTPUT's name with "
        ".100 and so on before its suffix. With --samples the images are taken in an order drawn by --seed.",
    ),
    click.option(
        "--sequential",
        is_flag=True,
        help="Of a decoder (hf:DIR): block by block, each with its weights alone in memory; the same command goes on "
        "where an interrupted one was.",
    ),
)
