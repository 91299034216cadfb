"""The notes of a package (.pt2) of AOTInductor: ports, precision and device, read without loading its code."""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from ground.errors import BadInput
from ground.ports import Role
from ground.records import record_from_text

from .ports import GraphPort

SUFFIX = ".pt2"
KEY = "export.package"
BATCH, LARGEST_BATCH = "batch", 1024
MOST_BYTES = 2**26
_METADATA = re.compile(r"[^/]+/data/aotinductor/model/[^/]+_metadata\.json")
_REMEDY = "expected one written by `export --format aoti`; compile it with that"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageNotes:
    """Facts that a package states about itself; the batch is the first size of every port.

    `device` is the one that it was compiled for, `torch` the version that compiled it. `carried` is the metadata
    beside, which includes torch's own keys (AOTI_CPU_ISA).
    """

    inputs: tuple[GraphPort, ...]
    outputs: tuple[GraphPort, ...]
    roles: dict[str, Role]
    precision: str
    device: Literal["cpu", "cuda"]
    torch: str
    carried: dict[str, str] = field(default_factory=dict)

    @property
    def batch(self) -> int | None:
        """The fixed batch size, None for any from 1 to LARGEST_BATCH."""
        size = self.inputs[0].shape[0]
        return size if isinstance(size, int) else None

    @property
    def compiled_for(self) -> str:
        """The instruction set of the CPU or the compute capability of the GPU that it was compiled for."""
        keys = ("AOTI_COMPUTE_CAPABILITY",) if self.device == "cuda" else ("AOTI_CPU_ISA",)
        return next((self.carried[key] for key in keys if self.carried.get(key)), "unknown")

    def as_metadata(self) -> dict[str, str]:
        own: Mapping[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name != "carried"}
        return {**self.carried, KEY: msgspec.json.encode(own).decode()}


def notes_of_package(path: Path) -> PackageNotes:
    """Read a package's notes. Raises BadInput for another file and for a package without them."""
    try:
        with zipfile.ZipFile(path) as archive:
            # One file each for the wrapper and for the kernels, with the same content.
            name = min(name for name in archive.namelist() if _METADATA.fullmatch(name))
            with archive.open(name) as entry:
                data = entry.read(MOST_BYTES + 1)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise BadInput(f"{path}: can't be read as a package of AOTInductor ({error!s:.200}); {_REMEDY}") from None
    except ValueError:
        raise BadInput(f"{path}: holds no program that AOTInductor compiled; {_REMEDY}") from None
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path}: its metadata has more than {MOST_BYTES} bytes; {_REMEDY}")
    where = f"{path}: its metadata"
    carried = record_from_text(data.decode("utf-8", "replace"), dict[str, Any], where=where)
    if not isinstance(carried.get(KEY), str):
        raise BadInput(f"{path}: its metadata has no {KEY}, so its ports are unknown; {_REMEDY}")
    notes = record_from_text(carried[KEY], PackageNotes, where=f"{where} {KEY}")
    if not notes.inputs or not notes.outputs or notes.roles.keys() != {port.name for port in notes.outputs}:
        raise BadInput(f"{where}: names no inputs or outputs, or no role for an output; {_REMEDY}")
    texts = {key: value for key, value in carried.items() if isinstance(value, str) and key != KEY}
    return PackageNotes(
        **{name: getattr(notes, name) for name in PackageNotes.__slots__ if name != "carried"}, carried=texts
    )


def is_for_gpu(path: Path) -> bool:
    """Return True if a package's notes name a GPU; one without notes counts as compiled for the CPU."""
    try:
        return notes_of_package(path).device == "cuda"
    except BadInput:
        return False
