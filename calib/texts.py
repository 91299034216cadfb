"""Documents of a UTF-8 text file, one a line: opened once, identified by content, read as named tensors."""

import codecs
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ground.errors import BadInput
from ground.files import refuse_utf16, regular_file

from .inputs import IndexedInputs, ids_from_hashes, input_count, refuse_dtypes

MOST_LINE_BYTES = 2**20
Encode = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""A tokenizer: turns documents [B] into tensors by name [B,...], padded to the same length in every batch."""


class Line(NamedTuple):
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts(IndexedInputs):
    """Documents, one a line; `first` is the first document, encoded."""

    noun: ClassVar[str] = "documents"

    path: Path
    lines: tuple[Line, ...]
    encode: Encode
    first: Mapping[str, Tensor]

    def example(self) -> Mapping[str, Tensor]:
        return self.first

    def _contents(self, places: Sequence[int]) -> list[bytes]:
        try:
            with regular_file(self.path).open("rb") as file:
                return [os.pread(file.fileno(), self.lines[place].size, self.lines[place].offset) for place in places]
        except OSError as error:
            raise BadInput(f"{self.path}: can't be read ({error.strerror})") from error

    def _hashes(self, places: Sequence[int]) -> list[bytes]:
        return [sha256(content).digest() for content in self._contents(places)]

    def _rows(self, positions: Sequence[int]) -> Mapping[str, Tensor]:
        contents = self._contents([self.places[position] for position in positions])
        hashes = (sha256(content).digest() for content in contents)
        if not torch.equal(ids_from_hashes(hashes), self.ids[list(positions)]):
            raise BadInput(f"{self.path}: changed since it was opened; don't change it while it is read")
        inputs, count = self.encode([content.decode() for content in contents]), len(contents)
        forms, expected = (_describe_tensors(tensors, size) for tensors, size in ((inputs, None), (self.first, count)))
        if forms != expected:
            raise BadInput(
                f"{self.path}: {count} documents encoded are {forms}, expected {expected} as for the first one; pad "
                "every batch to one length"
            )
        return inputs


def _describe_tensors(inputs: Mapping[str, Tensor], size: int | None) -> str:
    """Return every tensor's name, dtype and shape as one text; `size` replaces the size of the batch."""
    shapes = ((name, tensor.dtype, list(tensor.shape)) for name, tensor in inputs.items())
    return ", ".join(f"{name} {dtype} {shape if size is None else [size, *shape[1:]]}" for name, dtype, shape in shapes)


def _iter_lines(path: Path) -> Iterator[tuple[Line, str]]:
    with regular_file(path).open("rb") as file:
        offset = number = 0
        while whole := file.readline(MOST_LINE_BYTES + 2):
            number += 1
            content = whole.removesuffix(b"\n").removesuffix(b"\r")
            if len(content) > MOST_LINE_BYTES:
                raise BadInput(
                    f"{path}: line {number} is longer than {MOST_LINE_BYTES} bytes; expected text, a line a document"
                )
            mark = codecs.BOM_UTF8 if number == 1 and content.startswith(codecs.BOM_UTF8) else b""
            content = content.removeprefix(mark)
            try:
                yield Line(offset + len(mark), len(content)), content.decode()
            except UnicodeDecodeError as error:
                if number == 1:
                    refuse_utf16(content, str(path))
                raise BadInput(
                    f"{path}: line {number} is not UTF-8 ({error.reason} at byte {error.start + 1} of the line); save "
                    "the file as UTF-8"
                ) from None
            offset += len(whole)


def _read_lines(path: Path) -> tuple[Line, ...]:
    try:
        every = [(line, bool(text.strip())) for line, text in _iter_lines(path)]
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected UTF-8 text, a line a document") from None
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror})") from error
    lines = tuple(line for line, is_document in every if is_document)
    if not lines:
        holds = f"{len(every)} blank lines" if every else "nothing"
        raise BadInput(f"{path}: holds {holds}, expected UTF-8 text, a line a document")
    return lines


def open_texts(path: Path, *, encode: Encode, samples: int | None = None, seed: int = 0) -> Texts:
    """Open the documents in `path`, the lines that are not blank; `samples` of them are drawn by `seed`.

    Raises BadInput for a file that is missing, not regular, empty, not UTF-8 or has too long lines, for too few
    documents, and for tensors without a batch.
    """
    lines = _read_lines(path)
    opened = Texts(available=len(lines), path=path, lines=lines, encode=encode, first={})
    texts = opened.sampled(samples, seed, where=path)
    assert len(texts.ids) == texts.count  # hashed now, so that a change of the file while it is read is noticed
    first = encode([content.decode() for content in texts._contents(texts.places[:1])])
    if (count := input_count(first)) != 1:
        raise BadInput(f"{path}: one document is encoded as {count} inputs, expected 1")
    refuse_dtypes(first)
    return replace(texts, first=first)
