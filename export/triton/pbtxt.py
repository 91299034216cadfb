"""The text form of protocol buffers, in which config.pbtxt is written: a reader that keeps lines, and a writer."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ground.errors import BadInput
from ground.text import printable

Plain: TypeAlias = "str | int | float | bool | Mapping[str, Plain] | Sequence[Plain]"
Value: TypeAlias = "str | int | float | bool | Message"

_TRUTHS = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}
_CLOSING = {"{": "}", "<": ">"}
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|[0-9]+)")
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?[fF]?)")
LONGEST_NUMBER, LONGEST_MESSAGE = 40, 300
_SPELT = {chr(code): f"\\{code:03o}" for code in (*range(32), 127)} | {
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\t",
    "\\": "\\\\",
    '"': '\\"',
}


class Name(str):
    """A bare word, such as the enum value TYPE_FP32."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Field:
    """A field with one value; `dims: [3, 32, 32]` is three fields of one line."""

    name: str
    value: Value
    line: int


@dataclass(frozen=True, slots=True)
class Message:
    """The fields between two braces, or of the whole file, in order; as in protobuf, the last of several counts."""

    fields: tuple[Field, ...]
    line: int

    def all(self, name: str) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.name == name)

    def one(self, name: str) -> Field | None:
        return next(reversed(self.all(name)), None)

    def messages(self, name: str) -> tuple["Message", ...]:
        return tuple(field.value for field in self.all(name) if isinstance(field.value, Message))

    def message(self, name: str) -> "Message | None":
        return next(reversed(self.messages(name)), None)

    def inner(self, name: str) -> "Message":
        return self.message(name) or Message((), self.line)

    def numbers(self, name: str) -> tuple[int, ...]:
        return tuple(field.value for field in self.all(name) if isinstance(field.value, int))

    def text(self, name: str, default: str = "") -> str:
        field = self.one(name)
        return field.value if field is not None and isinstance(field.value, str) else default

    def number(self, name: str, default: int = 0) -> int:
        field = self.one(name)
        return field.value if field is not None and type(field.value) is int else default

    def line_of(self, name: str) -> int:
        """Return the line of a field, or of the message if the field is absent."""
        field = self.one(name)
        return self.line if field is None else field.line


class ParseError(BadInput):
    """An error of grammar at `line`."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"line {line}: {what}")
        self.what, self.line = what, line


def _word(tokens: Any, expected: str) -> str:
    token: str = tokens.token
    if not token[:1].isalpha() and not token.startswith("_"):
        raise tokens.ParseError(f"expected {expected}, got {token or 'the end of the file'!r}")
    tokens.NextToken()
    return token


def _fields(tokens: Any, closing: str, opened: int = 1) -> Iterator[Field]:
    expected = f"a field name or {closing!r}, opened on line {opened}" if closing else "a field name"
    while not tokens.TryConsume(closing):
        name = _word(tokens, expected)
        line = tokens.ParseErrorPreviousToken("").GetLine()
        has_colon = tokens.TryConsume(":")
        if not tokens.TryConsume("["):
            yield Field(name, _value(tokens, name, line, has_colon), line)
        elif not tokens.TryConsume("]"):
            yield Field(name, _value(tokens, name, line, has_colon), line)
            while tokens.TryConsume(","):
                yield Field(name, _value(tokens, name, line, has_colon), line)
            if not tokens.TryConsume("]"):
                raise tokens.ParseError(f"expected ',' or ']' in {name}, got {tokens.token!r}")
        if not tokens.TryConsume(","):
            tokens.TryConsume(";")


def _value(tokens: Any, name: str, line: int, has_colon: bool) -> Value:
    token: str = tokens.token
    if token in _CLOSING:
        tokens.NextToken()
        return Message(tuple(_fields(tokens, _CLOSING[token], line)), line)
    if not has_colon:
        raise tokens.ParseError(f"expected ':' or '{{' after {name}, got {token!r}")
    if token.startswith(('"', "'")):
        try:
            return str(tokens.ConsumeString())
        except DeprecationWarning as warning:
            raise tokens.ParseError(f"an escape that no server knows ({warning})") from None
    if not _NUMBER.fullmatch(token):
        word = _word(tokens, f"a value of {name}")
        return _TRUTHS.get(word, Name(word))
    if len(token) > LONGEST_NUMBER:
        raise tokens.ParseError(f"a number of {len(token)} digits, expected {LONGEST_NUMBER} at most")
    number: int | float = tokens.ConsumeInteger() if _INTEGER.fullmatch(token) else tokens.ConsumeFloat()
    return number


def parse(text: str) -> Message:
    """Parse a message in text format. Raises ParseError with the line for any other text.

    The tokenizer is protobuf's, whose own parser keeps no lines. An escape about which Python only warns is refused, as
    the server does.
    """
    from google.protobuf import text_format  # takes 0.1 s

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            return Message(tuple(_fields(text_format.Tokenizer(text.split("\n")), "")), 1)
    except text_format.ParseError as error:
        raise ParseError(str(error).partition(" : ")[2][:LONGEST_MESSAGE], error.GetLine()) from None
    except RecursionError:
        raise ParseError("messages are nested too deep", 1) from None


def pbtxt_from(fields: Mapping[str, Plain]) -> str:
    """Return fields as text, in order; a list of numbers is one field in brackets, another list repeats its field."""
    return "".join(f"{line}\n" for name, value in fields.items() for line in _lines(name, value, ""))


def _escaped(character: str) -> str:
    """Escape a character that would end a text or can't be printed."""
    if character in _SPELT or printable(character) == character:
        return _SPELT.get(character, character)
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogatepass"))


def _lines(name: str, value: Plain, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield f"{indent}{name} {{"
        for inner, inner_value in value.items():
            yield from _lines(inner, inner_value, indent + "  ")
        yield f"{indent}}}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, int | float) for item in value):
            yield f"{indent}{name}: [{', '.join(_scalar(item) for item in value)}]"
        else:
            for item in value:
                yield from _lines(name, item, indent)
    else:
        yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Plain) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Name):
        return f'"{"".join(map(_escaped, value))}"'
    return str(value)
