"""Reader of JSON records as typed values, with one message for each refused file; ground.files writes them.

A record is a frozen dataclass or msgspec.Struct, with its kind and version beside its fields. Size and nesting of a
file are checked before it is parsed.
"""

import codecs
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec
from msgspec import inspect

from .errors import BadInput
from .file_kinds import refuse_stand_in
from .files import refuse_utf16, regular_file

MOST_BYTES = 2**28
DEEPEST = 40
MAKE_AGAIN = "make the record again"
# A refusal of a larger record doesn't quote the received value, because finding it means parsing all without types.
_MOST_QUOTED_BYTES = 2**24
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b'[]{}"'))

T = TypeVar("T")
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]

if TYPE_CHECKING:
    Figure: TypeAlias = float
else:

    class _FloatIsOne(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, float)

    class Figure(metaclass=_FloatIsOne):
        """A float that may be infinite; null in a record is read as infinity."""


_SHOWN = 100
_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "null": "null",
    "object": "a JSON object",
    "array": "a list",
}
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


def _types_inside(info: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match info:
        case inspect.UnionType():
            for each in info.types:
                yield from _types_inside(each, step)
        case inspect.StructType() | inspect.DataclassType():
            yield from (field.type for field in info.fields if field.encode_name == step)
        case inspect.DictType():
            yield info.value_type
        case inspect.ListType() | inspect.VarTupleType():
            yield info.item_type
        case inspect.TupleType():
            yield info.item_types[int(step)]


def _expected_at(record: Any, steps: Iterable[str], *, key: bool) -> list[inspect.Type]:
    types = [inspect.type_info(record)]
    for step in steps:
        types = [inner for each in types for inner in _types_inside(each, step)]
    if key:
        return [each.key_type for each in types if isinstance(each, inspect.DictType)]
    return [each for info in types for each in (info.types if isinstance(info, inspect.UnionType) else [info])]


def _value_at(raw: Any, steps: Iterable[str]) -> Any:
    """Return the value at a path, UNSET if the path goes through a mapping's keys or doesn't exist."""
    for step in steps:
        try:
            raw = raw[int(step)] if isinstance(raw, list) else raw[step]
        except (LookupError, TypeError, ValueError):
            return msgspec.UNSET
    return raw


def _received_text(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _type_text(expected: str) -> str:
    return re.sub(
        r"`([^`]*)`", lambda match: " or ".join(_NOUNS.get(each, each) for each in match[1].split(" | ")), expected
    )


def _reason(problem: str, types: list[inspect.Type], value: Any) -> str:
    if match := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"the key {match[1]!r} is missing"
    if match := re.fullmatch(r"(?s)Object contains unknown field `(.*)`", problem):
        alternatives = [
            field.encode_name
            for each in types
            if isinstance(each, inspect.StructType | inspect.DataclassType)
            for field in each.fields
        ]
        near = get_close_matches(match[1], alternatives, n=1)
        hint = f"did you mean {near[0]!r}" if near else f"known are {', '.join(alternatives)}"
        return f"unknown key {match[1][:_SHOWN]!r}; {hint}"
    if match := re.fullmatch(r"(?s)Invalid enum value (.*)", problem):
        alternatives = [str(word) for each in types if isinstance(each, inspect.LiteralType) for word in each.values]
        return f"got {match[1][:_SHOWN]}, expected {' or '.join(alternatives)}"
    if match := re.fullmatch(r"(?s)Expected (.*?)(?:, got (.*))?", problem):
        received = _type_text(match[2] or "") if value is msgspec.UNSET else _received_text(value)
        return f"got {received}, expected {_type_text(match[1])}" if received else f"expected {_type_text(match[1])}"
    return problem.lower() if problem.endswith(" out of range") else problem


def _refusal(error: msgspec.ValidationError, record: Any, raw: Any, *, where: str) -> str:
    problem, _, place = str(error).rpartition(" - at ")
    if not problem:
        problem, place = place, ""
    key, path = place.startswith("`key`"), place.rpartition("`$")[2].rstrip("`")
    steps = [name or index for name, index in _STEP.findall(path)]
    reason = _reason(problem, _expected_at(record, steps, key=key), _value_at(raw, steps))
    if path and not key:
        where += path if path.startswith("[") else f": {path.removeprefix('.')}"
    elif key:
        where += f": a key of {path.removeprefix('.')}"
    return f"{where}: {reason}"


class Head(msgspec.Struct, frozen=True):
    kind: Any = None
    version: Any = None


def _figure(kind: type, value: Any) -> Any:
    if kind is not Figure:
        if isinstance(value, kind):
            return value  # an inner record that was built before the outer one
        raise NotImplementedError(kind)
    try:
        return math.inf if value is None else msgspec.convert(value, float)
    except msgspec.ValidationError as error:
        raise ValueError(error) from None  # msgspec adds the path to all errors except its own


def _refuse_depth(data: bytes, where: str) -> None:
    """Raise BadInput for JSON that is nested too deep, counting only brackets."""
    if not data.lstrip().startswith((b"{", b"[")):
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_SQUARE, _NO_BRACKET).replace(b'""', b"")
    brackets = re.sub(rb'"[^"]*"', b"", plain)
    too_deep = b"[" * (DEEPEST + 1)
    for _ in range(DEEPEST):
        if not brackets or too_deep in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    if too_deep in brackets or b"[]" in brackets:
        raise BadInput(f"{where}: its JSON is nested too deep; records have {DEEPEST} levels at most")


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_figure)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if "surrogate" not in str(error):
            raise
        return msgspec.convert(json.loads(data), kind, dec_hook=_figure)


def _decode_untyped(data: bytes) -> Any:
    try:
        return msgspec.UNSET if len(data) > _MOST_QUOTED_BYTES else _decode(data, Any)
    except ValueError:
        return msgspec.UNSET


def _decode_or_refuse(data: bytes, record: type[T], *, where: str, remedy: str) -> T:
    try:
        value: T = _decode(data, record)
    except msgspec.ValidationError as error:
        raise BadInput(f"{_refusal(error, record, _decode_untyped(data), where=where)}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON ({error!s:.200}); it may be cut short; {remedy}") from None
    return value


def _refuse_kind(head: Head, where: str, how: "How") -> None:
    kind, version, remedy = how["kind"], how.get("version", 1), how.get("remedy", MAKE_AGAIN)
    if head.kind != kind:
        article = "an" if kind[0] in "aeiou" else "a"
        what = "a file without a kind" if head.kind is None else repr(str(head.kind)[:100])
        raise BadInput(f"{where}: expected {article} {kind} record, got {what}")
    if type(head.version) is int and head.version == version:
        return
    newer = type(head.version) is int and head.version > version
    written = f"{kind} record of version {str(head.version)[:100]}{', written by a newer corp-deploy' if newer else ''}"
    mend = f"install that one, or {remedy}" if newer else remedy
    raise BadInput(f"{where}: {written}; this tool reads version {version}: {mend}")


class How(TypedDict, total=False):
    """Expected kind of a record (any if absent), its version (1 if absent), and the advice in refusals."""

    kind: str
    version: int
    remedy: str


def record_from_bytes(data: bytes, record: type[T], *, where: str, **how: Unpack[How]) -> T:
    """Return the record in a JSON text.

    Raises BadInput, naming `where`, for invalid, too large or too deeply nested JSON, for another kind or version, and
    for the first entry of a wrong type.
    """
    if len(data) > MOST_BYTES:
        raise BadInput(f"{where}: {len(data)} bytes, a record has {MOST_BYTES} at most")
    _refuse_depth(data, where)
    remedy = how.get("remedy", MAKE_AGAIN)
    if "kind" in how:
        _refuse_kind(_decode_or_refuse(data, Head, where=where, remedy=remedy), where, how)
    return _decode_or_refuse(data, record, where=where, remedy=remedy)


def record_from_text(text: str, record: type[T], *, where: str, **how: Unpack[How]) -> T:
    """Return the record in a string, as `record_from_bytes` does."""
    return record_from_bytes(
        text.removeprefix("\ufeff").encode("utf-8", "backslashreplace"), record, where=where, **how
    )


def record_from_file(path: Path, record: type[T], *, where: str | None = None, **how: Unpack[How]) -> T:
    """Return the record in a file, as `record_from_bytes` does.

    Raises BadInput for a missing file and for one that is not regular too.
    """
    try:
        size = regular_file(path).stat().st_size
        if size > MOST_BYTES:
            raise BadInput(f"{path}: {size} bytes, a record has {MOST_BYTES} at most")
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        refuse_utf16(data[:4], str(path))
        refuse_stand_in(data, where or str(path))
    except FileNotFoundError:
        raise BadInput(f"{path}: cannot be read: no such file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    return record_from_bytes(data, record, where=where or str(path), **how)


def record_from_value(value: Any, record: type[T], *, where: str, **how: Unpack[How]) -> T:
    """Return the record of parsed JSON values, as `record_from_bytes` does."""
    remedy = how.get("remedy", MAKE_AGAIN)
    if "kind" in how:
        _refuse_kind(record_from_value(value, Head, where=where, remedy=remedy), where, how)
    try:
        return msgspec.convert(value, record, dec_hook=_figure)
    except msgspec.ValidationError as error:
        raise BadInput(f"{_refusal(error, record, value, where=where)}; {remedy}") from None


def json_from_record(value: Any) -> Any:
    """Return a value as JSON: objects for dataclasses and mappings, lists for tuples, null for non-finite floats."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [json_from_record(each) for each in value]
    if isinstance(value, Mapping):
        return {key: json_from_record(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: json_from_record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
