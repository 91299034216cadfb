"""corp-deploy calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation.table import CALIBRATE
from corp_deploy.views.console import Output
from ground.quantities import IMAGES, SHARE_REMOVED

from .numbers import Alignment, Number, Numbers
from .options import (
    FILE,
    ModelChoice,
    batch_size_option,
    given_options,
    images_option,
    max_bad_option,
    model_options,
    output_options,
    samples_option,
    seed_option,
    workers_option,
)
from .repeat import command_again

if TYPE_CHECKING:
    from calib.collect import Precision


def _refuse_half_asked(
    system: bool, no_attention: bool, attn: object, first_pass: object, align: dict[str, int] | None
) -> None:
    if system and no_attention:
        raise click.UsageError("--attention-system and --no-attention exclude each other; give one")
    if attn is not None and not system:
        raise click.UsageError("--attn restricts the per-image system; give --attention-system with it")
    if attn is None and (first_pass is not None or align is not None):
        raise click.UsageError("--moments and --align belong to --attention-system --attn S; give them together")


@click.command()
@model_options
@images_option
@click.option("--output", "-o", type=FILE, required=True, help="Moments file to write (.safetensors).")
@samples_option
@seed_option
@batch_size_option
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the model runs."
)
@workers_option
@max_bad_option
@click.option("--sites", "patterns", multiple=True, help="Only sites that fit this pattern, such as 'blocks.3.*'.")
@click.option("--no-attention", is_flag=True, help="Take MLP statistics only.")
@click.option(
    "--attention-system", is_flag=True, help="Also take CORP's per-image system (eq. 15); --preset corp needs it."
)
@click.option(
    "--attn",
    type=Numbers(SHARE_REMOVED, example="0.5,0.75"),
    default=None,
    help="Take that system only for what reduce --attn S keeps at these shares: a second pass, far less memory.",
)
@click.option(
    "--moments",
    "first_pass",
    type=FILE,
    default=None,
    help="Moments of this model that rank the dimensions for --attn; without them a first pass is made.",
)
@click.option(
    "--align", type=Alignment(), default=None, help="As reduce will round the widths of --attn; default head=16."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "tf32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Precision of the forward pass; the statistics are float32 products and float64 sums in any case. "
    + CALIBRATE.help("dtype"),
)
@click.option(
    "--hold-out",
    type=Number(IMAGES),
    default=None,
    help="Leave N images out, drawn by --seed, and write theirs to OUTPUT's name with .held-out before its suffix.",
)
@click.option(
    "--checkpoint-every", type=Number(IMAGES), default=None, help="Save the state every N images, to go on from."
)
@click.option("--summary", type=FILE, default=None, help="Also write what OUTPUT holds, with its digest, as JSON.")
@output_options
def calibrate(
    model: ModelChoice,
    images: Path,
    output: Path,
    samples: int | None,
    seed: int,
    batch_size: int,
    device: str,
    workers: int,
    max_bad: int,
    patterns: tuple[str, ...],
    no_attention: bool,
    attention_system: bool,
    attn: tuple[float, ...] | None,
    first_pass: Path | None,
    align: dict[str, int] | None,
    dtype: "Precision",
    hold_out: int | None,
    checkpoint_every: int | None,
    summary: Path | None,
    out: Output,
) -> None:
    """Take the second-order statistics of a model in one pass over unlabelled images.

    Every image is looked at once; with the statistics that costs as much as about 2 bare forward passes. With --attn
    a pass before it ranks, unless --moments does.

    With --checkpoint-every, the same command goes on where an interrupted one was. Under torchrun every process takes
    its share of the images: torchrun --nproc-per-node 2 -m corp_deploy calibrate ... With --hold-out, the second file
    is for reduce --held-out, which judges every site on images that it was not fitted to.

    The per-image system of all dimensions is large: 40 GiB for DeiT-H. With --attention-system --attn S a second pass
    takes it for the kept ones alone, exactly, and for every larger share; moments ranked by the same --moments merge.

    Example: corp-deploy calibrate --model deit_small_patch16_224 --weights deit_small.safetensors --images photos/
    -o moments.safetensors
    """
    from corp_deploy.reduction.calibrate import Statistics, ranks_of_this_run
    from corp_deploy.reduction.moments_files import (
        CalibrationRequest,
        CalibrationRun,
        Restriction,
        reference_of_summary,
        write_moments,
    )
    from corp_deploy.store.inputs import images_for_model
    from corp_deploy.views.moments import line_of_moments
    from corp_deploy.views.preprocessing import preprocessing_line, preprocessing_record
    from ground.files import write_json
    from ground.gpu import require_device

    CALIBRATE.refuse([("", device)], given_options())
    require_device(device)
    _refuse_half_asked(attention_system, no_attention, attn, first_pass, align)
    asked = CalibrationRequest(
        statistics=Statistics(
            patterns=patterns, attention=not no_attention, attention_system=attention_system, precision=dtype
        ),
        restriction=None
        if attn is None
        else Restriction(sparsities=attn, align_head=(align or {}).get("head"), first=first_pass),
        batch_size=batch_size,
        device=device,
        seed=seed,
        hold_out=hold_out,
    )
    with ranks_of_this_run(device) as ranks:
        out = out if ranks.rank == 0 else Output(json=False, quiet=True)
        checkpoint = model.load(out)
        source = images_for_model(
            checkpoint.model, images, samples=samples, seed=seed, workers=workers, max_bad=max_bad
        )
        running = CalibrationRun(
            ranks=ranks,
            unfinished=output,
            save_every=checkpoint_every,
            needed=lambda size: out.note(f"the sums will take {size / 2**20:,.0f} MiB"),
            progress=lambda title, count: out.progress(f"calibrating {title}", count, unit="images"),
            fitting=lambda share: command_again(attn=f"{share:g}"),
        )
        summaries = write_moments(checkpoint, source, asked, running, output)
        if summaries and summary is not None:
            write_json(summary, reference_of_summary(summaries[0], str(output)))
        running.clear()
    if summaries:
        record, *held_out_record = summaries
        record |= preprocessing_record(checkpoint) | ({"held_out": held_out_record[0]} if held_out_record else {})
        out.result(record, *map(line_of_moments, summaries), preprocessing_line(checkpoint))
