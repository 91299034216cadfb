"""A finished stage's stamp: the digests of all it had read and of all its outputs, one JSON file. Imports no torch."""

from pathlib import Path
from typing import Literal

import msgspec

from ground.errors import BadInput
from ground.files import write_json
from ground.records import record_from_file


class Stamp(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="corp-deploy/stamp"):
    """What a finished stage had read (label to digest or setting) and what it left (file to sha256)."""

    version: Literal[1] = 1
    inputs: dict[str, str]
    outputs: dict[str, str]


def stamp_path(state: Path, stage: str) -> Path:
    return state / f"{stage}.json"


def read_stamp(state: Path, stage: str) -> Stamp | None:
    """The stage's stamp, or None when it never finished (or its stamp can't be read)."""
    try:
        return record_from_file(stamp_path(state, stage), Stamp)
    except BadInput:
        return None


def write_stamp(state: Path, stage: str, stamp: Stamp) -> None:
    write_json(stamp_path(state, stage), msgspec.to_builtins(stamp))
