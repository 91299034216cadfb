"""What transformers keeps beside a decoder and its tokenizer.json: to be written again beside a narrower one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ground.errors import BadInput
from ground.records import record_from_file

FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.json",
)
LENGTH = 512
"""Tokens of a sequence, where nobody says how many, or fewer where a model has fewer places."""


class Changes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What --model-kwargs may say of a decoder."""

    length: Annotated[int, Meta(ge=2, le=10_000_000)] | None = None


def decoder_files(directory: Path) -> dict[str, Any]:
    """The content of those that are there, by name."""
    return {name: record_from_file(directory / name, Any) for name in FILES if (directory / name).is_file()}


def require_decoder_files(files: Mapping[str, Any]) -> None:
    """Raises BadInput for a name that is none of them: it would be written to."""
    if foreign := [name for name in files if name not in FILES]:
        raise BadInput(f"lineage: a file of transformers at {foreign[0]!r:.150}; expected one of {', '.join(FILES)}")
