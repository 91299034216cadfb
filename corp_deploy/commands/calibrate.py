"""corp-deploy calibrate."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calib.active import ACTIVE_EPS
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.invocation.table import CALIBRATE
from corp_deploy.views.console import Output
from ground.quantities import GIGABYTES, IMAGES, MAGNITUDE, SHARE_REMOVED

from .input_choice import (
    InputChoice,
    decoding_options,
    drawing_options,
    images_option,
    input_options,
    text_option,
)
from .merging_choice import merging_of_statistics
from .model_choice import ModelChoice, model_options
from .numbers import Alignment, Number, Numbers
from .options import FILE, batch_size_option, explicit_options, output_options, value_options
from .repeat import command_again
from .stopwatch import keep_effort, stopwatch_on

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
        help="Also take what reads residual streams of convolutions; reduce --residual needs it.",
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
)


@click.command()
@model_options
@input_options(images_option(), text_option(), *drawing_options, *decoding_options)
@click.option("--output", "-o", type=FILE, required=True, help="Moments file to write (.safetensors).")
@statistics_options
@parts_options
@merging_of_statistics
@pass_options
@click.option("--summary", type=FILE, default=None, help="Also write what OUTPUT holds, with its digest, as JSON.")
@output_options
def calibrate(
    model: ModelChoice,
    inputs: InputChoice,
    output: Path,
    statistics: StatisticsChoice,
    parts: PartsChoice,
    merging: MergingChoice,
    passes: PassChoice,
    summary: Path | None,
    out: Output,
) -> None:
    """Take the second-order statistics of a model in one pass over unlabelled images.

    Every image is looked at once; with the statistics that costs as much as about 2 bare forward passes. With --attn
    a pass before it ranks, unless --moments does.

    With --checkpoint-every, the same command goes on where an interrupted one was. Under torchrun every process takes
    its share of the images: torchrun --nproc-per-node 2 -m corp_deploy calibrate ... With --hold-out, the second file
    is for reduce --held-out, which judges every site on images that it was not fitted to.

    With --groups the statistics are kept of two halves of the images that split no group, twice as large a file: reduce
    then chooses at every site how strong a ridge is, by what fits to either half lose on the other, and it is said here
    how many more groups would pay.

    The per-image system of all dimensions is large: 40 GiB for DeiT-H. With --attention-system --attn S a second pass
    takes it for the kept ones alone, exactly, and for every larger share; moments ranked by the same --moments merge.

    With --snapshots 100,500,1000 the moments of the first 100, 500 and 1000 images are what a calibration on these
    alone gives, so that one pass shows how many images are enough. A number that is a multiple of --batch-size needs no
    second copy of the sums in memory. The dims of --attn are ranked by all images, and so are the halves of --groups
    dealt; held-out images are the same for all. Images in the order of a sorted folder are not drawn: give --samples.

    With --merge-tokens the statistics are those of the model that merges so, each token counted as often as tokens
    stand in it; give reduce the same.

    Example: corp-deploy calibrate --model deit_small_patch16_224 --weights deit_small.safetensors --images photos/
    -o moments.safetensors
    """
    from corp_deploy.planning.merging import merging_checkpoint
    from corp_deploy.reduction.calibrate import ranks_of_this_run
    from corp_deploy.reduction.moments_files import (
        CalibrationRequest,
        CalibrationRun,
        write_moments,
    )
    from corp_deploy.reduction.summary import reference_of_summary
    from corp_deploy.views.moments import line_of_moments, lines_of_overfitting
    from corp_deploy.views.preprocessing import preprocessing_line, preprocessing_record
    from ground.files import write_json
    from ground.gpu import require_device

    CALIBRATE.refuse([("", passes.device)], explicit_options())
    require_device(passes.device)
    request = CalibrationRequest(
        statistics=statistics.statistics(),
        restriction=statistics.restriction(),
        batch_size=passes.batch_size,
        device=passes.device,
        seed=inputs.seed,
        hold_out=parts.hold_out,
        groups=parts.groups,
    )
    with stopwatch_on(passes.device) as watch, ranks_of_this_run(passes.device) as ranks:
        out = out if ranks.rank == 0 else Output(json=False, quiet=True)
        checkpoint = merging_checkpoint(model.load(out), merging)
        source = passes.source(inputs, checkpoint)
        unsaved = "" if passes.checkpoint_every is None else ", which --checkpoint-every saves only where it is given"
        run = CalibrationRun(
            ranks=ranks,
            unfinished=output,
            save_every=passes.checkpoint_every,
            snapshots=passes.snapshots,
            needed=lambda size: out.note(f"the sums will take {size / 2**20:,.0f} MiB"),
            progress=lambda title, count: out.progress(f"calibrating {title}", count, unit=source.noun),
            fitting=lambda share: command_again(attn=f"{share:g}"),
            smaller=lambda size: out.warn(f"memory ran out in a batch: begun anew with --batch-size {size}{unsaved}"),
        )
        resumed = run.goes_on
        with watch.of("calibrate"):
            summaries = write_moments(checkpoint, source, request, run, output)
        if summaries and summary is not None:
            write_json(summary, reference_of_summary(summaries[0], str(output)))
        run.clear()
    if summaries:
        keep_effort(watch, output, step="calibrate", device=passes.device, resumed=resumed)
        record, *held_out_record = summaries
        record |= preprocessing_record(checkpoint) | ({"held_out": held_out_record[0]} if held_out_record else {})
        every = [*record.get("snapshots", []), *summaries]
        lines = [line_of_moments(summary, source.noun) for summary in every]
        lines += lines_of_overfitting(summaries[0])
        out.result(record | {"effort": watch.as_json()}, *lines, preprocessing_line(checkpoint), *watch.lines)
