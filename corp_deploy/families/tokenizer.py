"""Texts -> token ids of one length with their mask, by a tokenizer.json. It is data: nothing in it is executed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ground.errors import BadInput, Missing
from ground.files import MOST_BYTES, regular

FILE = "tokenizer.json"
_TOKENS = Annotated[int, Meta(ge=1, le=1_000_000)]


class Tokenization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a text becomes tokens beside its tokenizer.json, whose digest is `sha256`: cut to `length` tokens, marks of
    start and end among them, and padded to it on the right.
    """

    length: _TOKENS
    pad_id: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    lower_case: bool = False
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class TextTokenizer:
    """A tokenizer of the tokenizers package, set to one length."""

    def __init__(self, path: Path, tokenization: Tokenization, *, vocabulary: int) -> None:
        """Raises Missing without the package, and BadInput for a file that is no tokenizer, for one whose ids the model
        with its `vocabulary` does not know, and for a length that its marks alone fill.
        """
        self.tokenization = tokenization
        self._inner = _read(path)
        largest = max(self._inner.get_vocab(with_added_tokens=True).values(), default=0)
        if max(largest, tokenization.pad_id) >= vocabulary:
            raise BadInput(
                f"{path}: its ids go up to {max(largest, tokenization.pad_id)}, the model has {vocabulary} words; it "
                "belongs to another model"
            )
        length, marks = tokenization.length, self._inner.num_special_tokens_to_add(is_pair=False)
        if length <= marks:
            raise BadInput(f"{path}: {length} tokens a text are no more than its {marks} marks of start and end")
        self._inner.enable_truncation(max_length=length)
        pad = self._inner.id_to_token(tokenization.pad_id) or "[PAD]"
        self._inner.enable_padding(length=length, pad_id=tokenization.pad_id, pad_token=pad, direction="right")

    def encode(self, texts: Sequence[str]) -> dict[str, NDArray[np.int64]]:
        """`input_ids` and `attention_mask` int64 [texts, length]."""
        given = [text.lower() for text in texts] if self.tokenization.lower_case else list(texts)
        encodings = self._inner.encode_batch(given)
        return {
            "input_ids": _int64([encoding.ids for encoding in encodings], self.tokenization.length),
            "attention_mask": _int64([encoding.attention_mask for encoding in encodings], self.tokenization.length),
        }


def _int64(rows: list[list[int]], length: int) -> NDArray[np.int64]:
    return np.asarray(rows, dtype=np.int64).reshape(len(rows), length)


def _read(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Missing("the package tokenizers is not installed: pip install 'corp-deploy[hf]'") from None
    if not path.exists():
        raise BadInput(f"{path}: no such file; save the model's fast tokenizer there: tokenizer.save_pretrained(DIR)")
    if regular(path).stat().st_size > MOST_BYTES:
        raise BadInput(f"{path}: larger than any tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise BadInput(f"{path}: not a tokenizer of the tokenizers package ({str(error)[:200]})") from None
