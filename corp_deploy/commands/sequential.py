"""calibrate --sequential: a decoder block by block; and what every calibration tells."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corp_deploy.invocation.calibration import CalibrateRun
from corp_deploy.invocation.inputs import InputOptions
from corp_deploy.views.console import Output
from ground.errors import BadInput

from .model_choice import ModelChoice
from .stopwatch import keep_effort, stopwatch_on

if TYPE_CHECKING:
    from corp_deploy.store.checkpoint import Checkpoint
    from ground.effort import Stopwatch


def tell_moments(
    summaries: Sequence[dict[str, Any]],
    checkpoint: "Checkpoint",
    noun: str,
    summary: Path | None,
    watch: "Stopwatch",
    out: Output,
    *more: str,
) -> None:
    """What was made of a calibration, in words and, where that is asked for, in the file `summary`."""
    from corp_deploy.reduction.summary import reference_of_summary
    from corp_deploy.views.inspection import preprocessing_line, preprocessing_record
    from corp_deploy.views.moments import line_of_moments, lines_of_overfitting
    from ground.files import write_json

    record, *held_out = summaries
    if summary is not None:
        write_json(summary, reference_of_summary(record, str(record["moments"])))
    lines = [line_of_moments(each, noun) for each in (*record.get("snapshots", []), *summaries)]
    lines += [*lines_of_overfitting(record), *more, preprocessing_line(checkpoint), *watch.lines]
    record |= preprocessing_record(checkpoint) | ({"held_out": held_out[0]} if held_out else {})
    out.result(record | {"effort": watch.as_json()}, *lines)


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
    from corp_deploy.store.decoder_layers import open_layers
    from corp_deploy.store.hub_snapshot import PREFIX

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
            summaries = write_moments_by_block(layers, source, run, output, hold_out=options.hold_out, seed=inputs.seed)
    keep_effort(watch, output, step="calibrate", device=options.device)
    tell_moments(summaries, layers.checkpoint, source.noun, summary, watch, out)
