"""calib.texts: reading order, digests, samples and refusals of document files."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calib import texts as texts_module
from calib.texts import Texts, open_texts
from ground.errors import BadInput
from tests import tiny_text
from tests.refusals import rejects

DOCUMENTS = ("one sheep", "two sheep, three", "four", "a fifth: äöü", "one sheep", "the last of them")
LENGTH = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "documents.txt", DOCUMENTS)


def written(path: Path, documents: Sequence[str]) -> Path:
    path.write_text("".join(f"{document}\n" for document in documents), encoding="utf-8")
    return path


def opened(path: Path, *, length: int = LENGTH, samples: int | None = None, seed: int = 0) -> Texts:
    return open_texts(path, encode=tiny_text.encode_to(length), samples=samples, seed=seed)


def documents_of(texts: Texts) -> list[str]:
    """Return the documents that reach the encoder, in batches of two."""
    encoded: list[str] = []

    def encode(documents: Sequence[str]) -> Mapping[str, Tensor]:
        encoded.extend(documents)
        return tiny_text.encode_to(LENGTH)(documents)

    list(replace(texts, encode=encode).batches(2))
    return encoded


def test_documents_keep_the_order_of_their_lines(path: Path) -> None:
    texts = opened(path)
    assert documents_of(texts) == list(DOCUMENTS)
    batches = list(texts.read(4))
    assert [batch.end for batch in batches] == [4, 6]
    assert [list(batch.inputs) for batch in batches] == [["input_ids", "attention_mask"]] * 2
    assert [batch.inputs["input_ids"].shape for batch in batches] == [(4, LENGTH), (2, LENGTH)]
    assert torch.equal(torch.cat([batch.ids for batch in batches]), texts.ids)
    middle = list(texts.read(2, first=1, stop=4))
    assert torch.equal(torch.cat([batch.ids for batch in middle]), texts.ids[1:4])


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_blank_lines_line_ends_and_byte_order_marks_are_skipped(tmp_path: Path, path: Path, line_end: str) -> None:
    other = tmp_path / "other.txt"
    lines = [DOCUMENTS[0], "", *DOCUMENTS[1:3], " \t", "\u00a0", *DOCUMENTS[3:]]
    other.write_bytes(b"\xef\xbb\xbf" + line_end.join(lines).encode())
    texts = opened(other)
    assert documents_of(texts) == list(DOCUMENTS)
    assert texts.count == 6
    assert torch.equal(texts.ids, opened(path).ids)
    assert texts.digest == opened(path).digest


def test_samples_are_seeded_and_sorted(tmp_path: Path) -> None:
    path = written(tmp_path / "many.txt", [f"document {number:02}" for number in range(50)])
    first, again, other = (opened(path, samples=10, seed=seed) for seed in (1, 1, 2))
    assert documents_of(first) == documents_of(again) != documents_of(other)
    assert documents_of(first) == sorted(set(documents_of(first)))
    assert (first.count, first.digest) == (10, again.digest)
    assert first.digest != other.digest
    for samples in (0, 51):
        rejects(f"got 50 documents, but {samples} samples were asked for", opened, path, samples=samples)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds nothing, expected UTF-8 text, a line a document"),
        (b"\n \n\t\r\n", "holds 3 blank lines, expected UTF-8 text"),
        (b"good\nand \xe4 not\n", r"line 2 is not UTF-8 \(invalid continuation byte at byte 5 of the line\); save"),
        ("text".encode("utf-16"), "the text is UTF-16, expected UTF-8; save it as UTF-8"),
        (b"good\n" + b"x" * 33, "line 2 is longer than 32 bytes"),
        (b"x" * 33 + b"\r\n", "line 1 is longer than 32 bytes"),
    ],
)
def test_malformed_document_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(texts_module, "MOST_LINE_BYTES", 32)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        opened(tmp_path / "bad.txt")
    assert str(tmp_path / "bad.txt") in str(error.value)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b""])
def test_longest_allowed_line_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line_end: bytes) -> None:
    monkeypatch.setattr(texts_module, "MOST_LINE_BYTES", 32)
    (tmp_path / "long.txt").write_bytes(b"x" * 32 + line_end)
    assert documents_of(opened(tmp_path / "long.txt")) == ["x" * 32]


def test_non_regular_files_are_refused(tmp_path: Path) -> None:
    rejects(r"documents\.txt: no such file, expected UTF-8 text", opened, tmp_path / "documents.txt")
    rejects("a directory, expected a regular file", opened, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    rejects("a pipe, socket or device, expected a regular file", opened, tmp_path / "pipe")


def test_file_that_changes_during_reading_is_refused(path: Path) -> None:
    texts = opened(path)
    written(path, ["One sheep", *DOCUMENTS[1:]])
    rejects("changed since it was opened", list, texts.batches(4))
    path.unlink()
    rejects(r"can't be read \(No such file or directory\)", list, texts.batches(4))


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda documents: {}, "no tensor; expected the same batch"),
        (lambda documents: {"ids": torch.zeros(2, 4)}, "one document is encoded as 2 inputs, expected 1"),
        (lambda documents: {"ids": torch.zeros(1, 4).double()}, "ids torch.float64"),
        (
            lambda documents: tiny_text.encode_to(max(map(len, documents)))(documents),
            r"input_ids torch.int64 \[2, 16\].*expected input_ids torch.int64 \[2, 9\].*to one length",
        ),
        (lambda documents: {"ids": torch.zeros(1, 4)}, r"ids torch.float32 \[1, 4\], expected ids .*\[2, 4\]"),
    ],
)
def test_unsuitable_encoders_are_refused(
    path: Path, encode: Callable[[Sequence[str]], Mapping[str, Tensor]], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        list(open_texts(path, encode=encode).batches(2))
