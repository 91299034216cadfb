"""corp-deploy calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..console import Output, output_options
from ..option_table import CALIBRATE
from ..quantities import IMAGES
from .numbers import Number
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

if TYPE_CHECKING:
    from calib.collect import Precision


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
    dtype: "Precision",
    hold_out: int | None,
    checkpoint_every: int | None,
    summary: Path | None,
    out: Output,
) -> None:
    """Take the second-order statistics of a model in one pass over unlabelled images.

    With --checkpoint-every, the same command goes on where an interrupted one was. Under torchrun every process takes
    its share of the images: torchrun --nproc-per-node 2 -m corp_deploy calibrate ... With --hold-out, the second file
    is for reduce --held-out, which judges every site on images that it was not fitted to.

    Example: corp-deploy calibrate --model deit_small_patch16_224 --weights deit_small.safetensors --images photos/
    -o moments.safetensors
    """
    from calib.checkpoint import Checkpoint as Saved
    from calib.images import parted
    from calib.store import save

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
    from ..preprocessing_view import preprocessing_line, preprocessing_record

    CALIBRATE.refuse([("", device)], given_options())
    require_device(device)
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
        needed = memory_needed(checkpoint, chosen_sites(checkpoint, wanted), wanted)
        out.note(f"the sums will take {needed / 2**20:,.0f} MiB")
        # Of the two, the pass over all the other images is the one worth going on with.
        every = checkpoint_every
        state = None if every is None else Saved(path=output.with_suffix(".partial.safetensors"), every=every)
        summaries = []
        for path, part in parts.items():
            with out.progress(f"calibrating {path.stem}", len(ranks.share(part.count)), unit="images") as done:
                moments = calibrate_checkpoint(
                    checkpoint,
                    part,
                    batch_size=batch_size,
                    device=device,
                    wanted=wanted,
                    saved=state if path == output else None,
                    ranks=ranks,
                    done=done,
                )
            if ranks.rank == 0:
                with replacing(path) as temporary:
                    save(moments, temporary)
                summaries.append(summary_of_moments(moments, path))
                if path == output and summary is not None:
                    write_json(summary, reference_of_moments(moments, path, str(path)))
        if state is not None:
            state.of_rank(ranks).clear()
    if ranks.rank == 0:
        record, *held_out = summaries
        record |= preprocessing_record(checkpoint) | ({"held_out": held_out[0]} if held_out else {})
        out.result(record, *map(line_of_moments, summaries), preprocessing_line(checkpoint))
