"""Python's language reference, cut into pieces of one length without padding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer
from torch import Tensor

from calib.texts import Texts, open_texts


def pieces(tokenizer_json: Path, tokens: int) -> list[str]:
    """Return pieces of this many token ids, including the marks of start and end."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    start, *_, end = tokenizer.encode("text").ids
    rows, inner = [], tokens - 2
    for name in sorted(topics):
        ids = tokenizer.encode(topics[name], add_special_tokens=False).ids
        rows += [(start, *ids[at : at + inner], end) for at in range(0, len(ids) - inner + 1, inner)]
    return [" ".join(map(str, row)) for row in rows]


def opened(path: Path, documents: Sequence[str]) -> Texts:
    """Write pieces to a file, and open them as inputs of the encoder."""

    def encode(batch: Sequence[str]) -> Mapping[str, Tensor]:
        ids_BN = torch.tensor([[int(number) for number in piece.split()] for piece in batch])
        return {"input_ids": ids_BN, "attention_mask": torch.ones_like(ids_BN)}

    path.write_text("\n".join(documents))
    return open_texts(path, encode=encode)
