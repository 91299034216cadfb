"""corp-deploy calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..console import Output, output_options
from ..option_table import CALIBRATE
from ..quantities import IMAGES, SHARE_REMOVED
from .numbers import Alignment, Number, Numbers
from .options import (
    FILE,
    ModelChoice,
    batch_size_option,
    given_options,
    images_option,
    max_bad_option,
    model_options,
    samples_option,
    seed_option,
    workers_option,
)
from .repeat import command_again

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calib.collect import Precision
    from calib.images import Images
    from calib.moments import Moments
    from calib.sites import Site

    from ..calibration import Wanted
    from ..checkpoint import Checkpoint


def _refuse_half_asked(
    system: bool, no_attention: bool, attn: object, first_pass: object, align: dict[str, int] | None
) -> None:
    if system and no_attention:
        raise click.UsageError("--attention-system and --no-attention exclude each other; give one")
    if attn is not None and not system:
        raise click.UsageError("--attn restricts the per-image system; give --attention-system with it")
    if attn is None and (first_pass is not None or align is not None):
        raise click.UsageError("--moments and --align belong to --attention-system --attn S; give them together")


def _refuse_too_large(
    checkpoint: "Checkpoint", sites: "Sequence[Site]", wanted: "Wanted", needed: "Mapping[str, int]", available: int
) -> None:
    """Raise BadInput when the sums won't fit, with a command whose sums do where there is one."""
    from calib.errors import BadInput
    from calib.memory import refuse_too_large

    from ..calibration import sparsity_that_fits
    from ..choices import PRESETS

    try:
        refuse_too_large(needed, available)
    except BadInput as error:
        align_head = PRESETS["corp"].align_head
        fits = None
        if wanted.attention_system and "attn" not in given_options():
            fits = sparsity_that_fits(checkpoint, sites, wanted, align_head, available)
        if fits is None:
            raise
        again = command_again(attn=f"{fits:g}")
        raise BadInput(f"{error}; what fits, for reductions of at least {fits:.0%} of each head: {again}") from None


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
    from dataclasses import replace

    from calib.checkpoint import Checkpoint as Saved
    from calib.images import parted
    from calib.memory import bytes_available
    from calib.store import load, save

    from ..calibration import (
        Wanted,
        chosen_sites,
        held_out_path,
        line_of_moments,
        memory_needed,
        ranks_of_this_run,
        reference_of_moments,
        summary_of_moments,
    )
    from ..calibration import calibrate as calibrate_checkpoint
    from ..files import replacing, write_json
    from ..inputs import images_for_model, require_device
    from ..kept_dims import kept_dims, kept_widths
    from ..preprocessing_view import preprocessing_line, preprocessing_record

    CALIBRATE.refuse([("", device)], given_options())
    require_device(device)
    _refuse_half_asked(attention_system, no_attention, attn, first_pass, align)
    wanted = Wanted(patterns=patterns, attention=not no_attention, attention_system=attention_system, precision=dtype)
    with ranks_of_this_run(device) as ranks:
        out = out if ranks.rank == 0 else Output(json=False, quiet=True)
        checkpoint = model.load(out)
        source = images_for_model(
            checkpoint.model, images, samples=samples, seed=seed, workers=workers, max_bad=max_bad
        )
        parts = {output: source}
        if hold_out is not None:
            parts = dict(zip((output, held_out_path(output)), parted(source, hold_out, seed=seed), strict=True))
        align_head = (align or {}).get("head")
        sites = chosen_sites(checkpoint, wanted)
        widths = {} if attn is None else kept_widths(checkpoint.model, sites, attn, align_head)
        needed = memory_needed(checkpoint, sites, wanted, widths)
        out.note(f"the sums will take {sum(needed.values()) / 2**20:,.0f} MiB")
        _refuse_too_large(checkpoint, sites, wanted, needed, bytes_available(device))
        # Held-out images are few: the passes over all the others are the ones worth going on with.
        first_path = output.with_name(f"{output.stem}.first{output.suffix}")
        every = checkpoint_every
        states = {
            path: Saved(path=path.with_suffix(".partial.safetensors"), every=every)
            for path in (output, first_path)
            if every is not None
        }

        def taken(path: Path, part: "Images", wanted: Wanted) -> "Moments":
            with out.progress(f"calibrating {path.stem}", len(ranks.share(part.count)), unit="images") as done:
                return calibrate_checkpoint(
                    checkpoint,
                    part,
                    batch_size=batch_size,
                    device=device,
                    wanted=wanted,
                    saved=states.get(path),
                    ranks=ranks,
                    done=done,
                )

        if widths:
            ranking = Wanted(patterns=tuple(widths), precision=dtype)
            first = load(first_pass) if first_pass else taken(first_path, parts[output], ranking)
            wanted = replace(wanted, kept=kept_dims(checkpoint.model, first, widths))
        summaries = []
        for path, part in parts.items():
            moments = taken(path, part, wanted)
            if ranks.rank == 0:
                with replacing(path) as temporary:
                    save(moments, temporary)
                summaries.append(summary_of_moments(moments, path))
                if path == output and summary is not None:
                    write_json(summary, reference_of_moments(moments, path, str(path)))
        for state in states.values():
            state.of_rank(ranks).clear()
    if ranks.rank == 0:
        record, *held_out = summaries
        record |= preprocessing_record(checkpoint) | ({"held_out": held_out[0]} if held_out else {})
        out.result(record, *map(line_of_moments, summaries), preprocessing_line(checkpoint))
