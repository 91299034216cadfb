"""The sample inputs of a release and how their replay is judged. Imports no torch."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from export.triton.rolling import Samples
from ground.arrays import array_from_npy
from ground.errors import BadInput
from ground.feeds import feeds_from_array
from ground.files import path_inside
from ground.precision import BFLOAT16, FLOAT8, type_by_name
from ground.records import record_from_file
from perf.parity.measures import FEATURE_MAP
from perf.parity.rounding import round_file
from perf.runners.onnx import OnnxRunner, onnx_precision
from perf.runners.protocol import Runner

from .names import AGAIN, SAMPLES_RECORD, graph_name

KIND = "corp-deploy/samples"
# Another CPU adds up in another order, and rounds half-precision weights' products elsewhere.
REPLAY_ERROR = {"fp32": 1e-4, "fp16": 1e-2, "mixed": 1e-2, "bf16": 8e-2, "mixed-bf16": 8e-2, "int8": 0.1, "fp8": 0.1}
BATCH = 8

Images = NDArray[np.float32] | NDArray[np.uint8]
Answers = NDArray[np.float32]


class GraphAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Where the answers of a graph stand, and how far others may be from them."""

    expected: str
    max_relative_error: float


class SamplesRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=KIND):
    """samples.json: where the images stand, how many there are, and the graphs that answered them. For measures of the
    user's own also the images' names and, where the held-out ones have labels, their file.
    """

    version: Literal[1] = 1
    images: str
    count: int
    graphs: dict[str, GraphAnswers]
    names: tuple[str, ...] = ()
    labels: str | None = None


def replayed(runner: Runner, images: Images) -> Answers:
    """The output for all images, a few at a time; of several all, one behind the other [N,F]."""
    parts = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    answers = [list(runner(feeds_from_array(part, runner.inputs)).values()) for part in parts]
    return np.concatenate([outputs[0] if len(outputs) == 1 else _joined(outputs) for outputs in answers])


def _joined(outputs: Sequence[Answers]) -> Answers:
    return np.concatenate([output.reshape(len(output), -1) for output in outputs], axis=1)


@contextmanager
def opened_graph(path: Path) -> Iterator[Runner]:
    """A graph on the CPU; one of BF16 or FP8, which ONNX Runtime has no arithmetic of there, rounds as it is typed."""
    if type_by_name(onnx_precision(path)) not in (BFLOAT16, FLOAT8):
        with OnnxRunner(path) as runner:
            yield runner
        return
    with tempfile.TemporaryDirectory() as scratch:
        rounded = Path(scratch) / path.name
        round_file(path, rounded)
        with OnnxRunner(rounded) as runner:
            yield runner


def of_release(folder: Path, name: str) -> Path:
    """A file that the record names. Raises BadInput for one outside of the release."""
    return path_inside(folder, name, where=str(folder / SAMPLES_RECORD))


def _difference(path: Path, graph: str, expected: Path, images: Images, known_as: GraphAnswers) -> str | None:
    expected_array = array_from_npy(expected)
    with opened_graph(path) as runner:
        logits = replayed(runner, images)
    if logits.shape != expected_array.shape:
        return f"{graph}: answers {list(logits.shape)} to the samples, expected {list(expected_array.shape)}"
    error = FEATURE_MAP.rows(expected_array, logits).relative_error()
    if not error <= (bound := known_as.max_relative_error):
        return f"{graph}: relative error {error:.2e} on the samples, at most {bound:g} is expected"
    return None


def replay(folder: Path) -> list[str]:
    """What differs when every graph of a release answers its sample inputs again; nothing when all is as it was.

    Raises BadInput for a record that can't be read, Missing without ONNX Runtime.
    """
    record = record_from_file(folder / SAMPLES_RECORD, SamplesRecord, kind=KIND, remedy=AGAIN)
    try:
        images = array_from_npy(of_release(folder, record.images))
        differences = [
            _difference(of_release(folder, name), name, of_release(folder, answers.expected), images, answers)
            for name, answers in record.graphs.items()
        ]
    except OSError as error:
        raise BadInput(f"{folder / 'samples'}: the samples can't be read ({error})") from None
    return [text for text in differences if text is not None]


def samples_of_release(folder: Path, max_relative_error: float) -> Samples:
    """Raises BadInput when the directory is no release with samples, or they can't be read."""
    record = record_from_file(folder / SAMPLES_RECORD, SamplesRecord, kind=KIND, remedy=AGAIN)
    graph = f"reduced/{graph_name('fp32')}"
    if graph not in record.graphs:
        raise BadInput(f"{folder / SAMPLES_RECORD}: no answers of {graph}, only of {', '.join(record.graphs)}")
    try:
        images, answers = (
            array_from_npy(of_release(folder, name)) for name in (record.images, record.graphs[graph].expected)
        )
    except OSError as error:
        raise BadInput(f"{folder / 'samples'}: the samples can't be read ({error})") from None
    if len(images) != len(answers) or not len(images):
        raise BadInput(f"{folder / 'samples'}: {len(images)} images and {len(answers)} answers, expected one each")
    return Samples(images=images, answers=answers, max_relative_error=max_relative_error)
