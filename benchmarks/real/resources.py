"""JPEG and WebP pictures in Qt resource files (.rcc), found by their headers."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

_HEADER = re.compile(rb"\xff\xd8\xff|RIFF....WEBP", re.DOTALL)


def pictures(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the suffix and the bytes of each picture; the four bytes before a picture have its size."""
    at = 0
    while (found := _HEADER.search(data, at)) is not None:
        start = found.start()
        size, at = int.from_bytes(data[max(start - 4, 0) : start], "big"), found.end()
        if len(found[0]) < size <= len(data) - start:
            at = start + size
            yield "jpg" if found[0].startswith(b"\xff") else "webp", data[start:at]


def unpack(resources: Path, directory: Path) -> None:
    """Write the pictures of all resource files to `directory`/FILE/DIGEST.SUFFIX, by their content's digest."""
    for path in sorted(resources.glob("*.rcc")):
        (directory / path.stem).mkdir(parents=True, exist_ok=True)
        for suffix, picture in pictures(path.read_bytes()):
            digest = hashlib.sha256(picture).hexdigest()[:8]
            (directory / path.stem / f"{digest}.{suffix}").write_bytes(picture)
