"""The record of a comparison of two decoders: JSON of kind "decoder-bench" with the fields of `DecoderBench`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ground.errors import BadInput
from ground.files import write_json
from ground.records import Positive, record_from_file

from .runs import Bench

KIND, VERSION = "decoder-bench", 1
AGAIN = "make the record again with `corp-deploy bench`"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The cache of a decoder: a key and a value [groups, head] per token and layer."""

    layers: Positive
    groups: Positive
    head: Positive
    value_bytes: Literal[2, 4] = 4

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.groups * self.head * self.value_bytes

    def size_bytes(self, *, length: int, batch: int) -> int:
        return self.token_bytes * length * batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A bench of prompts of one length."""

    length: Positive
    bench: Bench

    def __post_init__(self) -> None:
        if [row.batch for row in self.bench.rows] != [1]:
            raise BadInput(f"prefill of {self.length} tokens: expected one row, of batch 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderBench:
    """Benches of two decoders: prefill by length, and a decoding step with `cached` tokens by batch size."""

    created: str
    command: tuple[str, ...]
    caches: Mapping[str, KvCache]
    prefill: tuple[Prefill, ...]
    cached: Positive
    decode: Bench
    warnings: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [subject.name for subject in self.decode.subjects]
        every = [[subject.name for subject in each.bench.subjects] for each in self.prefill]
        if sorted(self.caches) != sorted(names) or any(each != names for each in every):
            raise BadInput(
                f"a record has two subjects, the same in all parts, got {names}, {sorted(self.caches)} and {every[:3]}"
            )
        lengths = [each.length for each in self.prefill]
        if len(set(lengths)) != len(lengths):
            raise BadInput(f"a record holds each length once, got {lengths}")

    @property
    def is_timed(self) -> bool:
        return self.decode.is_timed or any(each.bench.is_timed for each in self.prefill)


def save_decoder_bench(record: DecoderBench, path: Path) -> None:
    write_json(path, {"kind": KIND, "version": VERSION, **asdict(record)}, indent=1)


def load_decoder_bench(path: Path) -> DecoderBench:
    return record_from_file(path, DecoderBench, kind=KIND, version=VERSION, remedy=AGAIN)
