"""What an engine answered in one environment, kept with its inputs, for another environment to compare with.

A directory: inputs.npz, outputs.npz, and golden.json, which holds their digests, what answered and on what.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ground.arrays import arrays_from_npz
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, batch_size
from ground.files import replacing, sha256_of_file, write_json
from ground.ports import OutputPort
from ground.records import Positive, Sha256, json_from_record, record_from_file
from perf.parity.parity import ImageSet
from perf.parity.source import Source

KIND, VERSION = "golden", 1
RECORD, INPUTS, OUTPUTS = "golden.json", "inputs.npz", "outputs.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRecord:
    """golden.json. `batch`: the size at which it answered; `names` of the inputs, where they have any."""

    source: Source
    images: ImageSet
    batch: Positive
    outputs: tuple[OutputPort, ...]
    inputs_sha256: Sha256
    outputs_sha256: Sha256
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Inputs [N, ...] by name and what one artefact answered to them."""

    source: Source
    images: ImageSet
    batch: int
    outputs: tuple[OutputPort, ...]
    feeds: Feeds
    answers: Outputs
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [port.name for port in self.outputs]
        if sorted(names) != sorted(self.answers) or batch_size(self.feeds) != batch_size(self.answers):
            raise BadInput(
                f"golden outputs {', '.join(self.answers)} of {batch_size(self.answers)} inputs, expected "
                f"{', '.join(names)} of {batch_size(self.feeds)}; write them again"
            )


def write_golden(golden: Golden, directory: Path) -> None:
    """The record last, so that a directory that has one is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, arrays in ((INPUTS, golden.feeds), (OUTPUTS, golden.answers)):
        with replacing(directory / name) as temporary, temporary.open("wb") as file:
            np.savez(file, **{key: np.asarray(array) for key, array in arrays.items()})  # type: ignore[arg-type]
    record = GoldenRecord(
        source=golden.source,
        images=golden.images,
        batch=golden.batch,
        outputs=golden.outputs,
        inputs_sha256=sha256_of_file(directory / INPUTS),
        outputs_sha256=sha256_of_file(directory / OUTPUTS),
        names=golden.names,
    )
    write_json(directory / RECORD, {"kind": KIND, "version": VERSION, **json_from_record(record)})


def read_golden(directory: Path) -> Golden:
    """Raises BadInput for a directory that is none, and for arrays that are not those that its record names."""
    again = "write it again with `corp-deploy verify A.plan --write-golden DIR`"
    record = record_from_file(directory / RECORD, GoldenRecord, kind=KIND, version=VERSION, remedy=again)
    arrays = {
        name: _arrays(directory / name, digest)
        for name, digest in ((INPUTS, record.inputs_sha256), (OUTPUTS, record.outputs_sha256))
    }
    return Golden(
        source=record.source,
        images=record.images,
        batch=record.batch,
        outputs=record.outputs,
        feeds=arrays[INPUTS],
        answers=arrays[OUTPUTS],
        names=record.names,
    )


def _arrays(path: Path, digest: str) -> Mapping[str, NDArray[Any]]:
    if not path.is_file() or sha256_of_file(path) != digest:
        what = "its bytes are not those" if path.is_file() else "missing, a file"
        raise BadInput(f"{path}: {what} that {RECORD} describes; copy or write the directory again")
    return arrays_from_npz(path)
