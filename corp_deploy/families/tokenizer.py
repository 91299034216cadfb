"""Tokenization by a tokenizer.json: texts padded to one length for an encoder, or one text cut into full rows.

The file is data: no code of it is run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from calib.rows import cut_into_rows
from ground.errors import BadInput, Missing
from ground.file_kinds import refuse_stand_in
from ground.files import refuse_utf16, regular_file, sha256_of_text
from ground.ports import Port
from ground.records import MOST_BYTES

FILE = "tokenizer.json"
_TOKENS = Annotated[int, Meta(ge=1, le=1_000_000)]


class Tokenization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of tokenization beside the tokenizer.json, whose digest is `sha256`.

    Texts are cut to `length` tokens, special tokens included, and padded to it on the right.
    """

    length: _TOKENS
    pad_id: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    lower_case: bool = False
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    @property
    def ports(self) -> tuple[Port, ...]:
        """The inputs of a model: `input_ids` and `attention_mask`, which is 1 for a token and 0 for padding."""
        return tuple(Port(name=name, shape=(self.length,), dtype="int64") for name in ("input_ids", "attention_mask"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """Base of specs of text: its tokenization, the content of tokenizer.json, and the model's number of token ids."""

    tokenization: Tokenization
    tokenizer_json: str
    vocabulary: int
    medium: ClassVar[Literal["images", "text", "arrays"]] = "text"
    words: ClassVar[str]

    @property
    def shape(self) -> tuple[int]:
        return (self.tokenization.length,)

    def as_line(self) -> str:
        lower = ", lower-cased" if self.tokenization.lower_case else ""
        return (
            f"{self.words.format(self.tokenization.length)}{lower}, {FILE} of sha256 {self.tokenization.sha256[:12]}..."
        )

    def tokenizer(self) -> Any:
        """Return the tokenizer of the package tokenizers.

        Raises Missing without the package, and BadInput for a tokenizer that can't be read, has ids beyond the model's
        vocabulary, or whose special tokens fill the length.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Missing("the package tokenizers is not installed: pip install 'corp-deploy[hf]'") from None
        try:
            inner = Tokenizer.from_str(self.tokenizer_json)
        except Exception as error:  # the package raises nothing narrower
            raise BadInput(f"{FILE}: not a tokenizer of the tokenizers package ({str(error)[:200]})") from None
        length, pad_id = self.tokenization.length, self.tokenization.pad_id
        largest = max([pad_id, *inner.get_vocab(with_added_tokens=True).values()])
        if largest >= self.vocabulary:
            raise BadInput(
                f"{FILE}: its ids go up to {largest}, the model knows {self.vocabulary}; it belongs to another model"
            )
        marks = inner.num_special_tokens_to_add(is_pair=False)
        if length <= marks:
            raise BadInput(f"{FILE}: {length} tokens a text are no more than its {marks} special tokens")
        return inner

    def as_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.tokenization)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec(_Spec):
    """The inputs of an encoder: texts, each cut or padded to one length."""

    words: ClassVar[str] = "texts of {} tokens, cut or padded"

    @property
    def ports(self) -> tuple[Port, ...]:
        return self.tokenization.ports

    def encoder(self) -> Callable[[Sequence[str]], Mapping[str, Tensor]]:
        """Return the function of texts [B] -> `input_ids` and `attention_mask` [B,N]. Raises as `tokenizer` does."""
        inner = self.tokenizer()
        length, pad_id = self.tokenization.length, self.tokenization.pad_id
        inner.enable_truncation(max_length=length)
        pad = inner.id_to_token(pad_id) or "[PAD]"
        inner.enable_padding(length=length, pad_id=pad_id, pad_token=pad, direction="right")

        def encode(texts: Sequence[str]) -> Mapping[str, Tensor]:
            texts = [text.lower() for text in texts] if self.tokenization.lower_case else list(texts)
            encodings = inner.encode_batch(texts)
            ids, masks = ([getattr(each, name) for each in encodings] for name in ("ids", "attention_mask"))
            return {
                port.name: torch.tensor(rows, dtype=torch.int64).reshape(len(rows), length)
                for port, rows in zip(self.ports, (ids, masks), strict=True)
            }

        return encode


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec(_Spec):
    """The inputs of a decoder: full sequences of ids, into which one text is cut."""

    words: ClassVar[str] = "text cut into sequences of {} tokens"

    @property
    def ports(self) -> tuple[Port, ...]:
        return (Port(name="input_ids", shape=self.shape, dtype="int64"),)

    def sequences(self, lines: Iterable[str], *, where: str) -> NDArray[np.int64]:
        """Return one text, given as lines with their ends, as rows of ids [S,N].

        Each row begins with the special tokens that start a text; an incomplete row at the end is dropped.
        Raises as `tokenizer` does, and BadInput for a text shorter than one row.
        """
        inner = self.tokenizer()
        inner.no_truncation()
        inner.no_padding()
        ids, left = list[int](), iter(lines)
        while some := list(islice(left, _LINES)):
            for encoding in inner.encode_batch(some, add_special_tokens=False):
                ids += encoding.ids
        example = inner.encode("a", add_special_tokens=True)
        first = next((at for at, is_special in enumerate(example.special_tokens_mask) if not is_special), 0)
        marks = example.ids[:first]
        rows = cut_into_rows(np.asarray(ids, dtype=np.int64), self.tokenization.length - len(marks), where=where)
        return np.concatenate([np.tile(np.asarray(marks, dtype=np.int64), (len(rows), 1)), rows], axis=1)


_LINES = 1000  # the number of lines that are tokenized at once


def content_of_tokenizer(directory: Path, *, sha256: str | None = None) -> str:
    """Return the text of a directory's tokenizer.json. Raises BadInput where it is missing or has another digest."""
    path = directory / FILE
    if not path.exists():
        raise BadInput(f"{path}: no such file; save the model's fast tokenizer there: tokenizer.save_pretrained(DIR)")
    if regular_file(path).stat().st_size > MOST_BYTES:
        raise BadInput(f"{path}: {path.stat().st_size} bytes, larger than any tokenizer")
    try:
        data = path.read_bytes()
        refuse_stand_in(data, str(path))
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse_utf16(error.object, str(path))
        raise BadInput(f"{path}: not UTF-8 ({error.reason}); it is no tokenizer") from None
    if sha256 is not None and (digest := sha256_of_text(content)) != sha256:
        raise BadInput(
            f"{path}: sha256 {digest[:16]}..., expected {sha256[:16]}...; it was changed after the model was written: "
            "write the model again"
        )
    return content


def digest_of_tokenizer(directory: Path, *, needed: bool = True) -> str:
    """Return the SHA-256 of a directory's tokenizer.json; zeros where it is missing and not `needed`."""
    if not needed and not (directory / FILE).exists():
        return "0" * 64
    return sha256_of_text(content_of_tokenizer(directory))
