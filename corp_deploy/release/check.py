"""Checks of a finished release: signature, digests, manifest, and sample inputs replayed. Imports no torch."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from corp_deploy.store.manifest import load_manifest
from export.triton.rolling import Samples
from ground.arrays import array_from_npy
from ground.errors import BadInput
from ground.feeds import feeds_from_array
from ground.files import path_inside, sha256_of_file
from ground.precision import BFLOAT16, FLOAT8, type_by_name
from ground.records import record_from_file
from perf.parity.measures import FEATURE_MAP
from perf.parity.rounding import round_file
from perf.runners.onnx import OnnxRunner, onnx_precision
from perf.runners.protocol import Runner

from .names import AGAIN, MANIFEST, PROVENANCE, SAMPLES_RECORD, SUMS, graph_name
from .signature import Signed, Unverified, sums_from_file, unlisted_files
from .verifier import Verifier

KIND = "corp-deploy/samples"
# Other CPUs sum in another order and round the products of half-precision weights at other places.
REPLAY_ERROR = {"fp32": 1e-4, "fp16": 1e-2, "mixed": 1e-2, "bf16": 8e-2, "mixed-bf16": 8e-2, "int8": 0.1, "fp8": 0.1}
BATCH = 8
LINK = "a link, expected the file itself"

Images = NDArray[np.float32] | NDArray[np.uint8]
Answers = NDArray[np.float32]


class GraphAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The file with a graph's outputs for the samples, and the largest relative error that a replay may have."""

    expected: str
    max_relative_error: float


class SamplesRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=KIND):
    """The content of samples.json: the file and number of the images, and the graphs with their outputs.

    For metrics of [parity] it also has the images' names and, if there are labels, the file of the labels.
    """

    version: Literal[1] = 1
    images: str
    count: int
    graphs: dict[str, GraphAnswers]
    names: tuple[str, ...] = ()
    labels: str | None = None


def run_on_images(runner: Runner, images: Images) -> Answers:
    """Return the graph's output for all images [N,...]; several outputs are flattened and concatenated [N,F]."""
    parts = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    answers = [list(runner(feeds_from_array(part, runner.inputs)).values()) for part in parts]
    rows = [
        outputs[0] if len(outputs) == 1 else np.concatenate([each.reshape(len(each), -1) for each in outputs], axis=1)
        for outputs in answers
    ]
    return np.concatenate(rows)


@contextmanager
def opened_graph(path: Path) -> Iterator[Runner]:
    """Open a graph on the CPU, one of BF16 or FP8 as a copy that computes in float32 and rounds to those types."""
    with tempfile.TemporaryDirectory() as scratch:
        if type_by_name(onnx_precision(path)) in (BFLOAT16, FLOAT8):
            rounded = Path(scratch) / path.name
            round_file(path, rounded)
            path = rounded
        with OnnxRunner(path) as runner:
            yield runner


def path_in_release(folder: Path, name: str) -> Path:
    """Return the path of a file that samples.json names; raise BadInput for one outside the release."""
    return path_inside(folder, name, where=str(folder / SAMPLES_RECORD))


def load_samples(folder: Path) -> SamplesRecord:
    return record_from_file(folder / SAMPLES_RECORD, SamplesRecord, kind=KIND, remedy=AGAIN)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{folder / 'samples'}: the samples can't be read ({error})") from None


def _differences(folder: Path, record: SamplesRecord) -> Iterator[str]:
    images = array_from_npy(path_in_release(folder, record.images))
    for graph, known_as in record.graphs.items():
        expected, bound = array_from_npy(path_in_release(folder, known_as.expected)), known_as.max_relative_error
        with opened_graph(path_in_release(folder, graph)) as runner:
            answers = run_on_images(runner, images)
        if answers.shape != expected.shape:
            yield f"{graph}: answers {list(answers.shape)} to the samples, expected {list(expected.shape)}"
        elif not (error := FEATURE_MAP.rows(expected, answers).relative_error()) <= bound:
            yield f"{graph}: relative error {error:.2e} on the samples, at most {bound:g} is expected"


def replay(folder: Path) -> list[str]:
    """Run every graph of a release on its samples again; return a sentence for each graph whose outputs differ.

    Raises BadInput for samples that can't be read, Missing without ONNX Runtime.
    """
    with _reading(folder):
        return list(_differences(folder, load_samples(folder)))


def samples_of_release(folder: Path, max_relative_error: float) -> Samples:
    """Read the samples and the reduced model's FP32 outputs, to test a server; raise BadInput for a folder without."""
    record, graph = load_samples(folder), f"reduced/{graph_name('fp32')}"
    if graph not in record.graphs:
        raise BadInput(f"{folder / SAMPLES_RECORD}: no answers of {graph}, only of {', '.join(record.graphs)}")
    with _reading(folder):
        files = record.images, record.graphs[graph].expected
        images, answers = (array_from_npy(path_in_release(folder, each)) for each in files)
    if len(images) != len(answers) or not len(images):
        raise BadInput(f"{folder / 'samples'}: {len(images)} images and {len(answers)} answers, expected one each")
    return Samples(images=images, answers=answers, max_relative_error=max_relative_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A check's result: number of files, a sentence for each difference, and name, version and signer if known."""

    files: int
    graphs_replayed: bool
    differs: tuple[str, ...]
    name: str | None = None
    version: str | None = None
    signed_by: str | None = None


def _called(folder: Path) -> dict[str, Any]:
    release = load_manifest(folder / MANIFEST).release
    return {} if release is None else msgspec.structs.asdict(release)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRelease:
    """The expected signer, name and version of a release; None accepts any name or version."""

    verifier: Verifier
    name: str | None = None
    version: str | None = None

    def signed(self, folder: Path) -> Signed:
        """Return the signature of a release after verifying it, before any other file of the release is parsed.

        Raises Unverified also for another name or version, since the signature of an older release stays valid.
        """
        signed = self.verifier.verify(folder)
        if MANIFEST not in signed.files:
            raise Unverified(f"{MANIFEST}: missing, so the signature covers no release")
        called = _called(folder)
        for what, expected in (("name", self.name), ("version", self.version)):
            actual = called.get(what)
            if expected is not None and expected != actual:
                raise Unverified(f"{MANIFEST}: the signed {what} is {actual!r:.100}, expected {expected!r:.100}")
        return signed


def _changed(folder: Path, digests: Mapping[str, str]) -> dict[str, str]:
    changed = {}
    for name, digest in digests.items():
        try:
            path = path_inside(folder, name, where=SUMS)
        except BadInput:
            changed[name] = f"{name}: {LINK}"
            continue
        if not path.is_file():
            changed[name] = f"{name}: missing"
        elif (now := sha256_of_file(path)) != digest:
            changed[name] = f"{name}: sha256 {now[:16]}..., {SUMS} says {digest[:16]}..."
    return changed


def check_release(folder: Path, expected: ExpectedRelease | None = None) -> Checked:
    """Verify the signature if one is expected, then compare all digests, then replay the samples if no file differs.

    If the signature doesn't verify, no other file is parsed. A model repository has only a signature to check.

    Raises BadInput for a directory that is not a release, Missing without ONNX Runtime or the library for signatures.
    """
    try:
        signed = None if expected is None else expected.signed(folder)
    except Unverified as unverified:
        return Checked(files=0, graphs_replayed=False, differs=unverified.differs)
    called: dict[str, Any] = {} if signed is None else {"signed_by": signed.by}
    if signed is not None and SUMS not in signed.files:  # a model repository: the signature is its list
        return Checked(files=len(signed.files), graphs_replayed=False, differs=(), **called, **_called(folder))
    if (folder / SUMS).is_symlink():
        return Checked(files=0, graphs_replayed=False, differs=(f"{SUMS}: {LINK}",))
    sums = sums_from_file(folder / SUMS)
    changed = _changed(folder, sums)
    differs = [*changed.values(), *(f"{name}: in no list of this release" for name in unlisted_files(folder, sums))]
    if MANIFEST in sums and MANIFEST not in changed:
        # The two lists have to agree, so that neither can be edited alone.
        entries = {name: entry.sha256 for name, entry in load_manifest(folder / MANIFEST).files.items()}
        listed = {name: digest for name, digest in sums.items() if name not in (MANIFEST, PROVENANCE)}
        unequal = (name for name in sorted({*entries, *listed}) if entries.get(name) != listed.get(name))
        differs += [f"{name}: {MANIFEST} and {SUMS} differ" for name in unequal]
        called |= _called(folder)
    differs += [] if changed else replay(folder)
    return Checked(files=len(sums), graphs_replayed=not changed, differs=tuple(differs), **called)
