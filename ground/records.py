"""Records: JSON as typed values, read within bounds or refused in one message; ground.files writes them.

What a record holds is a frozen dataclass or msgspec.Struct; its kind and version stand beside its fields. The size and
nesting of a file are judged before anything is built from it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec

from .errors import BadInput
from .files import regular_file
from .refusal import refusal

MOST_BYTES = 2**28
DEEPEST = 40
MAKE_AGAIN = "make the record again"
# Beyond this size a refusal doesn't say what it got, which would mean reading all of it without types.
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
        """A float that need not be finite: null in a record, read as inf."""


class Head(msgspec.Struct, frozen=True):
    """What any record says of itself."""

    kind: Any = None
    version: Any = None


def _figure(kind: type, value: Any) -> Any:
    if kind is not Figure and isinstance(value, kind):
        return value  # read before the record around it, by what that says of it
    if kind is not Figure:
        raise NotImplementedError(kind)
    try:
        return math.inf if value is None else msgspec.convert(value, float)
    except msgspec.ValidationError as error:
        raise ValueError(error) from None  # msgspec adds the path to any error but its own


def _refuse_depth(data: bytes, where: str) -> None:
    """Takes away texts and all that is no bracket, then the innermost pairs of brackets, level by level."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_SQUARE, _NO_BRACKET).replace(b'""', b"")
    brackets = re.sub(rb'"[^"]*"', b"", plain)
    too_deep = b"[" * (DEEPEST + 1)
    for _ in range(DEEPEST):
        if not brackets or too_deep in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    if too_deep in brackets or b"[]" in brackets:
        raise BadInput(f"{where}: its JSON is nested too deep; records have {DEEPEST} levels at most")


def _decoded(data: bytes, kind: Any) -> Any:
    """A file name that is no UTF-8 stands in JSON as half a surrogate pair, which Python's reader alone takes."""
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_figure)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if "surrogate" not in str(error):
            raise
        return msgspec.convert(json.loads(data), kind, dec_hook=_figure)


def _untyped(data: bytes) -> Any:
    """The JSON values, UNSET for a text too long for that or broken further on."""
    try:
        return msgspec.UNSET if len(data) > _MOST_QUOTED_BYTES else _decoded(data, Any)
    except ValueError:
        return msgspec.UNSET


def _read(data: bytes, record: type[T], *, where: str, remedy: str) -> T:
    try:
        value: T = _decoded(data, record)
    except msgspec.ValidationError as error:
        raise BadInput(f"{refusal(error, record, _untyped(data), where=where)}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON ({error!s:.200}); it may be cut short; {remedy}") from None
    return value


def _refuse_kind(head: Head, where: str, how: "How") -> None:
    """A version is a whole number: nothing is guessed from a record without one."""
    kind, version, remedy = how["kind"], how.get("version", 1), how.get("remedy", MAKE_AGAIN)
    oldest = how.get("oldest", version)
    if head.kind != kind:
        article = "an" if kind[0] in "aeiou" else "a"
        raise BadInput(f"{where}: expected {article} {kind} record, got {str(head.kind)[:100]!r}")
    if type(head.version) is int and oldest <= head.version <= version:
        return
    newer = type(head.version) is int and head.version > version
    written = f"{kind} record of version {str(head.version)[:100]}{', written by a newer corp-deploy' if newer else ''}"
    mend = f"install that one, or {remedy}" if newer else remedy
    versions = [str(each) for each in range(oldest, version + 1)]
    read = " and ".join(filter(None, (", ".join(versions[:-1]), versions[-1])))
    raise BadInput(f"{where}: {written}; this tool reads version{'s' * (oldest < version)} {read}: {mend}")


class How(TypedDict, total=False):
    """Of which kind and version a record is to be, any where no kind is given; of `oldest` and those up to `version`
    where both are; and what to do about one that isn't.
    """

    kind: str
    version: int
    oldest: int
    remedy: str


def record_from_bytes(data: bytes, record: type[T], *, where: str, **how: Unpack[How]) -> T:
    """The value that a JSON text holds.

    Raises BadInput for what is no JSON, too large or too deep, another kind or version, and for the first entry of
    another type, naming `where` and the entry.
    """
    if len(data) > MOST_BYTES:
        raise BadInput(f"{where}: {len(data)} bytes, a record has {MOST_BYTES} at most")
    _refuse_depth(data, where)
    remedy = how.get("remedy", MAKE_AGAIN)
    if "kind" in how:
        _refuse_kind(_read(data, Head, where=where, remedy=remedy), where, how)
    return _read(data, record, where=where, remedy=remedy)


def record_from_text(text: str, record: type[T], *, where: str, **how: Unpack[How]) -> T:
    """As record_from_bytes, of a text that a header or an option carries."""
    return record_from_bytes(text.encode("utf-8", "backslashreplace"), record, where=where, **how)


def record_from_file(path: Path, record: type[T], *, where: str | None = None, **how: Unpack[How]) -> T:
    """As record_from_bytes, `where` being the path. Raises BadInput also for a missing file, and for no regular one."""
    try:
        size = regular_file(path).stat().st_size
        if size > MOST_BYTES:
            raise BadInput(f"{path}: {size} bytes, a record has {MOST_BYTES} at most")
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{path}: cannot be read: no such file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    return record_from_bytes(data, record, where=where or str(path), **how)


def record_from_value(value: Any, record: type[T], *, where: str, **how: Unpack[How]) -> T:
    """As record_from_bytes, of JSON values that are read already."""
    remedy = how.get("remedy", MAKE_AGAIN)
    if "kind" in how:
        _refuse_kind(record_from_value(value, Head, where=where, remedy=remedy), where, how)
    try:
        return msgspec.convert(value, record, dec_hook=_figure)
    except msgspec.ValidationError as error:
        raise BadInput(f"{refusal(error, record, value, where=where)}; {remedy}") from None


def json_from_record(value: Any) -> Any:
    """JSON values: objects of dataclasses and mappings, lists of tuples, null for a float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [json_from_record(each) for each in value]
    if isinstance(value, Mapping):
        return {key: json_from_record(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: json_from_record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
