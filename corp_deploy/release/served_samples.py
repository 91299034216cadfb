"""A release's samples for a server that is asked them: images, and the reduced model's own answers in FP32."""

from pathlib import Path

from export.triton.rolling import Samples
from ground.arrays import array_from_npy
from ground.errors import BadInput
from ground.files import below
from ground.records import record_from_file

from .names import AGAIN, SAMPLES_RECORD, graph_name
from .samples import KIND, SamplesRecord


def samples_of_release(folder: Path, max_relative_error: float) -> Samples:
    """Raises BadInput when the directory is no release with samples, or they can't be read."""
    record = record_from_file(folder / SAMPLES_RECORD, SamplesRecord, kind=KIND, remedy=AGAIN)
    graph = f"reduced/{graph_name('fp32')}"
    if graph not in record.graphs:
        raise BadInput(f"{folder / SAMPLES_RECORD}: no answers of {graph}, only of {', '.join(record.graphs)}")
    try:
        images, answers = (
            array_from_npy(below(folder, name, where=str(folder / SAMPLES_RECORD)))
            for name in (record.images, record.graphs[graph].expected)
        )
    except OSError as error:
        raise BadInput(f"{folder / 'samples'}: the samples can't be read ({error})") from None
    if len(images) != len(answers) or not len(images):
        raise BadInput(f"{folder / 'samples'}: {len(images)} images and {len(answers)} answers, expected one each")
    return Samples(images=images, answers=answers, max_relative_error=max_relative_error)
