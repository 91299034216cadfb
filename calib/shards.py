"""Images inside webdataset tar shards, read at random positions without unpacking."""

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ground.errors import BadInput

from .count import SUFFIXES
from .sources import ImageShape, Transform, image_from_bytes, refuse_large
from .tar import members_of_tar

MOST_SHARDS = 100_000
_RANGE = re.compile(r"\{([0-9]{1,12})\.\.([0-9]{1,12})\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One image of a shard: where its bytes lie."""

    shard: Path
    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The image members of tar files, shard after shard, in the order they were written."""

    members: tuple[Member, ...]
    shape: ImageShape
    transform: Transform

    def __len__(self) -> int:
        return len(self.members)

    def name(self, position: int) -> str:
        member = self.members[position]
        return f"{member.shard.name}/{member.name}"

    def content(self, position: int) -> bytes:
        member = self.members[position]
        refuse_large(member.size, f"{member.shard}/{member.name}")
        try:
            with member.shard.open("rb") as file:
                return os.pread(file.fileno(), member.size, member.offset)
        except OSError as error:
            raise BadInput(f"{member.shard}: can't be read ({error.strerror})") from error

    def image(self, position: int) -> Tensor:
        where = f"{self.members[position].shard}/{self.members[position].name}"
        return image_from_bytes(self.content(position), where, self.shape, self.transform)


def paths_from_pattern(pattern: str) -> list[Path]:
    """`shards-{000..099}.tar` -> a hundred paths; the width of the first number is kept."""
    parts = _RANGE.split(pattern)
    literals, ranges, count = parts[::3], [], 1
    for first, last in zip(parts[1::3], parts[2::3], strict=True):
        if int(first) > int(last):
            raise BadInput(f"{pattern}: range {first}..{last} runs backwards")
        count *= int(last) - int(first) + 1
        if count > MOST_SHARDS:
            raise BadInput(f"{pattern}: {count} shards, expected {MOST_SHARDS} at most")
        ranges.append([str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)])
    woven = [
        "".join(itertools.chain(*zip(literals, (*numbers, ""), strict=True))) for numbers in itertools.product(*ranges)
    ]
    return [Path(text) for text in woven]


def _members_of(shard: Path) -> list[Member]:
    try:
        return [
            Member(shard=shard, name=member.name, offset=member.offset, size=member.size)
            for member in members_of_tar(shard)
            if member.name.lower().endswith(SUFFIXES)
        ]
    except FileNotFoundError as error:
        raise BadInput(f"{shard}: no such shard") from error
    except OSError as error:
        raise BadInput(f"{shard}: can't be read ({error.strerror})") from error


def shards_from_pattern(pattern: str, *, shape: ImageShape, transform: Transform) -> Shards:
    """Opens `x.tar` or `x-{000..099}.tar`; reads only the headers. Raises BadInput for a missing or damaged shard."""
    members = [member for path in paths_from_pattern(pattern) for member in _members_of(path)]
    if not members:
        raise BadInput(f"{pattern}: no images in it, expected members ending in {', '.join(SUFFIXES)}")
    return Shards(members=tuple(members), shape=shape, transform=transform)
