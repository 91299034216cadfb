"""The text form of protocol buffers, as config.pbtxt is written in it: a reader that knows lines, and a writer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ground.errors import BadInput
from ground.text import printable

Plain: TypeAlias = "str | int | float | bool | Mapping[str, Plain] | Sequence[Plain]"
Value: TypeAlias = "str | int | float | bool | Message"

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|\#[^\n]*)|(?P<line>\n)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?[fF]?))(?![\w.])
    |(?P<name>-?[A-Za-z_][\w.]*)|(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r"""\\(?:(?P<letter>[abfnrtv?\\"'])|(?P<octal>[0-7]{1,3})|[xX](?P<byte>[0-9a-fA-F]{1,2})
    |(?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8}))|(?P<other>.))""",
    re.VERBOSE,
)
_LETTERS = dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))
_TRUTHS = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}
_CLOSING = {"{": "}", "<": ">"}


LONGEST_NUMBER = 40
LARGEST_CHARACTER = 0x10FFFF
_SPELT = {chr(code): f"\\{code:03o}" for code in (*range(32), 127)} | {
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\t",
    "\\": "\\\\",
    '"': '\\"',
}


class Name(str):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    value: Value
    line: int


@dataclass(frozen=True, slots=True)
class Message:
    """The fields between two braces, or of the whole file, in order; of several the last counts, as for protobuf."""

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
        field = self.one(name)
        return self.line if field is None else field.line


class ParseError(BadInput):
    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"line {line}: {what}")
        self.what, self.line = what, line


def parse(text: str) -> Message:
    reader = _Reader(list(_tokens(text)))
    try:
        return Message(tuple(reader.fields(closing=None)), 1)
    except RecursionError:
        raise ParseError("messages are nested too deep", 1) from None


def pbtxt_from(fields: Mapping[str, Plain]) -> str:
    return "".join(f"{line}\n" for name, value in fields.items() for line in _lines(name, value, ""))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    line, start = 1, 0
    while start < len(text):
        match = _TOKEN.match(text, start)
        if match is None:
            raise ParseError(f"{text[start : start + 20].splitlines()[0]!r} is not understood", line)
        kind = match.lastgroup or ""
        if kind == "line":
            line += 1
        elif kind != "space":
            yield _Token(kind, match.group(), line)
        start = match.end()
    yield _Token("end", "the end of the file", line)


class _Reader:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens, self.at = tokens, 0

    def fields(self, closing: str | None) -> Iterator[Field]:
        opened = self._peek().line
        while not self._accept(closing):
            token = self._next()
            if token.kind != "name":
                hint = f", opened on line {opened}" if closing else ""
                alternative = f" or {closing!r}{hint}" if closing else ""
                raise ParseError(f"expected a field name{alternative}, got {token.text!r}", token.line)
            yield from self._values(token)
            if not self._accept(","):
                self._accept(";")

    def _values(self, name: _Token) -> Iterator[Field]:
        colon = self._accept(":")
        if not self._accept("["):
            yield Field(name.text, self._value(name, colon), name.line)
            return
        ended = self._accept("]")
        while not ended:
            yield Field(name.text, self._value(name, colon), name.line)
            ended = self._accept("]")
            if not ended and not self._accept(","):
                token = self._peek()
                raise ParseError(f"expected ',' or ']' in {name.text}, got {token.text!r}", token.line)

    def _value(self, name: _Token, colon: bool) -> Value:
        token = self._next()
        if token.text in _CLOSING:
            return Message(tuple(self.fields(_CLOSING[token.text])), name.line)
        if not colon:
            raise ParseError(f"expected ':' or '{{' after {name.text}, got {token.text!r}", token.line)
        if token.kind == "text":
            parts = [token]
            while self._peek().kind == "text":
                parts.append(self._next())
            return "".join(_unquoted(part) for part in parts)
        if token.kind == "number":
            return _number(token)
        if token.kind == "name":
            return _TRUTHS.get(token.text, Name(token.text))
        raise ParseError(f"expected a value of {name.text}, got {token.text!r}", token.line)

    def _peek(self) -> _Token:
        return self.tokens[self.at]

    def _next(self) -> _Token:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def _accept(self, text: str | None) -> bool:
        token = self._peek()
        matches = token.kind == "end" if text is None else token.kind == "mark" and token.text == text
        if matches:
            self._next()
        return matches


def _number(token: _Token) -> int | float:
    if len(token.text) > LONGEST_NUMBER:
        raise ParseError(f"a number of {len(token.text)} digits, expected {LONGEST_NUMBER} at most", token.line)
    digits = token.text.lstrip("-+")
    if re.fullmatch(r"0[0-9].*", digits):
        try:
            return int(token.text, 8)
        except ValueError:
            fault = f"{token.text} begins with 0 and is no octal number; write it without"
            raise ParseError(fault, token.line) from None
    if digits.isdecimal():
        return int(token.text)
    if "x" in digits.lower():
        return int(token.text, 16)
    return float(token.text.rstrip("fF"))


def _unquoted(token: _Token) -> str:
    raw, end = bytearray(), 0
    inner = token.text[1:-1]
    try:
        for match in _ESCAPE.finditer(inner):
            raw += inner[end : match.start()].encode() + _escaped(match, token.line)
            end = match.end()
        return (raw + inner[end:].encode()).decode()
    except UnicodeError:
        raise ParseError(f"{token.text[:40]} is not UTF-8", token.line) from None


def _escaped(match: re.Match[str], line: int) -> bytes:
    if letter := match["letter"]:
        return _LETTERS.get(letter, letter).encode()
    if code := match["short"] or match["long"]:
        if int(code, 16) > LARGEST_CHARACTER:
            raise ParseError(f"{match[0]} is no character", line)
        return chr(int(code, 16)).encode()
    value = int(match["octal"], 8) if match["octal"] else int(match["byte"] or "100", 16)
    if value > 0xFF:
        raise ParseError(f"{match[0]} is no escape", line)
    return bytes([value])


def _spelt(character: str) -> str:
    """Escape characters that would end a text or not be shown."""
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
        return f'"{"".join(map(_spelt, value))}"'
    return str(value)
