"""The files that sentence-transformers and transformers write beside a model's weights.

Those of sentence-transformers say how an encoder's tokens are pooled and how long a text may be. All are written again
beside a reduced model. Only their values are read; the classes that they name are not imported.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ground.errors import BadInput
from ground.records import record_from_file

from .hf_encoders import Pooling

DECODER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.json",
)
LENGTH = 512  # the default number of tokens of a decoder's sequence, in models that have as many positions


class Changes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entries of --model-kwargs for a decoder; `length` is the number of tokens of a sequence."""

    length: Annotated[int, Meta(ge=2, le=10_000_000)] | None = None


def read_files(directory: Path, paths: Iterable[str] = DECODER_FILES) -> dict[str, Any]:
    """Return the content of each of these files that the directory has, by its path there."""
    return {path: record_from_file(directory / path, Any) for path in paths if (directory / path).is_file()}


def require_decoder_files(files: Mapping[str, Any]) -> None:
    """Raise BadInput for a name that is none of DECODER_FILES, since its file would be written."""
    if foreign := [name for name in files if name not in DECODER_FILES]:
        raise BadInput(
            f"lineage: a file of transformers at {foreign[0]!r:.150}; expected one of {', '.join(DECODER_FILES)}"
        )


_MODES: Mapping[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "cls": "first", "cls_token": "first"}
_MODE = "pooling_mode_"
MODULES, _SENTENCE, _TOKENIZER = "modules.json", "sentence_bert_config.json", "tokenizer_config.json"
FILES = (MODULES, _SENTENCE, _TOKENIZER)
"""The files beside an encoder; the first one names the folder of the pooling's configuration."""

Record = TypeVar("Record")


class _Module(msgspec.Struct, frozen=True, kw_only=True):
    path: Annotated[str, Meta(max_length=200)]
    type: str


class PooledBy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pooling of a text's tokens to one embedding."""

    pooling: Pooling
    normalize: bool


def _read(path: Path, kind: type[Record]) -> Record | None:
    remedy = "take it as sentence-transformers and transformers write it"
    return record_from_file(path, kind, remedy=remedy) if path.exists() else None


def _pooling(config: Mapping[str, Any], where: str) -> Pooling:
    chosen = [name.removeprefix(_MODE) for name, value in config.items() if name.startswith(_MODE) and value is True]
    chosen = chosen or [str(config.get("pooling_mode", "none"))]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise BadInput(
            f"{where}: pooling by {', '.join(chosen):.200}; expected the mean of the tokens or the first one"
        )
    return _MODES[chosen[0]]


def pooled_by(directory: Path) -> PooledBy | None:
    """Return the pooling that modules.json and the files that it names say; None without a modules.json.

    Raises BadInput for modules that are not built here, such as a dense layer after the pooling.
    """
    path = directory / MODULES
    modules = _read(path, list[_Module])
    if modules is None:
        return None
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise BadInput(
            f"{path}: the modules are {', '.join(kinds):.200}; expected Transformer, Pooling and perhaps Normalize"
        )
    folder = modules[1].path
    if modules[0].path not in ("", ".") or Path(folder).name != folder or folder in ("", "..", "."):
        raise BadInput(f"{path}: expected the transformer in the directory itself and the pooling in a folder there")
    config = directory / folder / "config.json"
    return PooledBy(pooling=_pooling(record_from_file(config, dict[str, Any]), str(config)), normalize=len(kinds) == 3)


class _SentenceLength(msgspec.Struct, frozen=True, kw_only=True):
    max_seq_length: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    do_lower_case: bool = False


class _TokenizerLength(msgspec.Struct, frozen=True, kw_only=True):
    model_max_length: float | None = None  # a very large float where the length is unlimited


class TextLength(msgspec.Struct, frozen=True, kw_only=True):
    """The most tokens of a text, and whether it is lower-cased before the tokenizer sees it."""

    tokens: int
    lower_case: bool


def text_length(directory: Path, longest: int) -> TextLength:
    """Return the limits by sentence_bert_config.json, tokens else by tokenizer_config.json, and at most `longest`."""
    sentence = _read(directory / _SENTENCE, _SentenceLength) or _SentenceLength()
    tokenizer = _read(directory / _TOKENIZER, _TokenizerLength) or _TokenizerLength()
    limit = sentence.max_seq_length or tokenizer.model_max_length or longest
    if limit < 1:
        raise BadInput(f"{directory}: a text may have {limit:g} tokens; expected at least 1")
    return TextLength(tokens=int(min(limit, longest)), lower_case=sentence.do_lower_case)


def sentence_files(directory: Path) -> dict[str, Any]:
    """Return the content of each of FILES and of the pooling's configuration that the directory has, by path."""
    modules = _read(directory / MODULES, list[_Module]) or []
    return read_files(directory, (*FILES, *(f"{module.path}/config.json" for module in modules[1:2])))


def require_sentence_files(files: Mapping[str, Any]) -> None:
    """Raise BadInput for a path other than FILES and FOLDER/config.json, since its file would be written."""
    for path in files:
        folder, _, name = path.rpartition("/")
        own = Path(folder).name == folder and folder not in (".", "..")
        if path not in FILES and not (folder and own and name == "config.json"):
            raise BadInput(f"lineage: a file of transformers at {path!r:.150}; expected one in the encoder's directory")
