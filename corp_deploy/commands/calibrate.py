"""corp-deploy calibrate."""

from pathlib import Path

import click

from ..console import Output, output_options
from .options import (
    FILE,
    ModelChoice,
    batch_size_option,
    images_option,
    model_options,
    samples_option,
    seed_option,
)


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
@click.option("--workers", type=click.IntRange(0), default=0, show_default=True, help="Processes that decode images.")
@click.option(
    "--attention-system", is_flag=True, help="Also take CORP's per-image system (eq. 15); --preset corp needs it."
)
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
    attention_system: bool,
    out: Output,
) -> None:
    """Take the second-order statistics of a model in one pass over unlabelled images.

    Example: corp-deploy calibrate --model deit_small_patch16_224 --weights deit_small.safetensors --images photos/ -o
    moments.safetensors
    """
    from calib.store import save

    from ..calibration import calibrate as calibrate_model
    from ..calibration import summary_of_moments
    from ..files import replacing
    from ..inputs import images_for_model

    checkpoint = model.load()
    source = images_for_model(checkpoint.model, images, samples=samples, seed=seed, workers=workers)
    with out.progress("calibrating", source.count, unit="images") as done:
        moments = calibrate_model(
            checkpoint, source, batch_size=batch_size, device=device, attention_system=attention_system, done=done
        )
    with replacing(output) as temporary:
        save(moments, temporary)
    record = summary_of_moments(moments, output)
    out.result(
        record, f"{output}: {len(moments.sites)} sites, {moments.images} images, {output.stat().st_size / 1e6:.1f} MB"
    )
