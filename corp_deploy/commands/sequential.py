"""calibrate --sequential: a decoder block by block."""

from pathlib import Path

from corp_deploy.invocation.calibration import CalibrateRun
from corp_deploy.invocation.inputs import InputOptions
from corp_deploy.views.console import Output
from ground.errors import BadInput

from .model_choice import ModelChoice
from .stopwatch import keep_effort, stopwatch_on


def calibrate_by_block(
    model: ModelChoice,
    inputs: InputOptions,
    output: Path,
    options: CalibrateRun,
    summary: Path | None,
    out: Output,
) -> None:
    """The moments of a decoder of a directory of transformers, of which no more than a block is held at once."""
    from calib.distributed import under_torchrun
    from corp_deploy.reduction.sequential import SequentialRun, write_moments_by_block
    from corp_deploy.reduction.summary import reference_of_summary
    from corp_deploy.store.decoder_layers import open_layers
    from corp_deploy.store.hub_snapshot import PREFIX
    from corp_deploy.views.inspection import preprocessing_line, preprocessing_record
    from corp_deploy.views.moments import line_of_moments
    from ground.files import write_json

    if under_torchrun():
        raise BadInput("--sequential: one process takes block after block; start it without torchrun")
    if not model.model.startswith(PREFIX):
        raise BadInput(f"--sequential: --model {model.model} is no directory of a decoder; give --model hf:DIR")
    with stopwatch_on(options.device) as watch:
        layers = open_layers(Path(model.model.removeprefix(PREFIX)), model.kwargs or {})
        source = inputs.open(layers.checkpoint)
        blocks = layers.arguments.decoder.layers
        with out.progress(f"calibrating {output.stem}", blocks, unit="blocks") as bar, watch.measure("calibrate"):
            run = SequentialRun(
                statistics=options.statistics,
                batch_size=options.batch_size,
                device=options.device,
                on_bytes_needed=lambda size: out.note(f"a block with all streams will take {size / 2**20:,.0f} MiB"),
                on_progress=bar,
            )
            record, *held_out = write_moments_by_block(
                layers, source, run, output, hold_out=options.hold_out, seed=inputs.seed
            )
        if summary is not None:
            write_json(summary, reference_of_summary(record, str(output)))
    keep_effort(watch, output, step="calibrate", device=options.device)
    lines = [line_of_moments(each, source.noun) for each in (record, *held_out)]
    record |= preprocessing_record(layers.checkpoint) | ({"held_out": held_out[0]} if held_out else {})
    out.result(record | {"effort": watch.as_json()}, *lines, preprocessing_line(layers.checkpoint), *watch.lines)
