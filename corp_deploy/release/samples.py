"""The sample inputs of a release and how their replay is judged. Imports no torch."""

import tempfile
from collections.abc import Iterator
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
    rows = [
        outputs[0] if len(outputs) == 1 else np.concatenate([each.reshape(len(each), -1) for each in outputs], axis=1)
        for outputs in answers
    ]
    return np.concatenate(rows)


@contextmanager
def opened_graph(path: Path) -> Iterator[Runner]:
    """A graph on the CPU; one of BF16 or FP8, which ONNX Runtime has no arithmetic of there, rounds as it is typed."""
    with tempfile.TemporaryDirectory() as scratch:
        if type_by_name(onnx_precision(path)) in (BFLOAT16, FLOAT8):
            rounded = Path(scratch) / path.name
            round_file(path, rounded)
            path = rounded
        with OnnxRunner(path) as runner:
            yield runner


def of_release(folder: Path, name: str) -> Path:
    """A file that the record names. Raises BadInput for one outside of the release."""
    return path_inside(folder, name, where=str(folder / SAMPLES_RECORD))


def load_samples(folder: Path) -> SamplesRecord:
    """The record in a release. Raises BadInput for one that is missing or can't be read."""
    return record_from_file(folder / SAMPLES_RECORD, SamplesRecord, kind=KIND, remedy=AGAIN)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raises BadInput for a file that can't be read."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{folder / 'samples'}: the samples can't be read ({error})") from None


def _differences(folder: Path, record: SamplesRecord) -> Iterator[str]:
    images = array_from_npy(of_release(folder, record.images))
    for graph, known_as in record.graphs.items():
        expected, bound = array_from_npy(of_release(folder, known_as.expected)), known_as.max_relative_error
        with opened_graph(of_release(folder, graph)) as runner:
            answers = replayed(runner, images)
        if answers.shape != expected.shape:
            yield f"{graph}: answers {list(answers.shape)} to the samples, expected {list(expected.shape)}"
        elif not (error := FEATURE_MAP.rows(expected, answers).relative_error()) <= bound:
            yield f"{graph}: relative error {error:.2e} on the samples, at most {bound:g} is expected"


def replay(folder: Path) -> list[str]:
    """What differs when every graph of a release answers its sample inputs again; nothing when all is as it was.

    Raises BadInput for a record that can't be read, Missing without ONNX Runtime.
    """
    with _reading(folder):
        return list(_differences(folder, load_samples(folder)))


def samples_of_release(folder: Path, max_relative_error: float) -> Samples:
    """Raises BadInput when the directory is no release with samples, or they can't be read."""
    record, graph = load_samples(folder), f"reduced/{graph_name('fp32')}"
    if graph not in record.graphs:
        raise BadInput(f"{folder / SAMPLES_RECORD}: no answers of {graph}, only of {', '.join(record.graphs)}")
    with _reading(folder):
        arrays = [array_from_npy(of_release(folder, each)) for each in (record.images, record.graphs[graph].expected)]
    images, answers = arrays
    if len(images) != len(answers) or not len(images):
        raise BadInput(f"{folder / 'samples'}: {len(images)} images and {len(answers)} answers, expected one each")
    return Samples(images=images, answers=answers, max_relative_error=max_relative_error)
