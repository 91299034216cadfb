"""The text form of protocol buffers, as config.pbtxt is written in it: a reader that knows lines, and a writer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ground.errors import BadInput

Plain: TypeAlias = "str | int | float | bool | Mapping[str, Plain] | Sequence[Plain]"
Value: TypeAlias = "str | int | float | bool | Message"

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)|(?P<line>\n)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?[fF]?))(?![\w.])
    |(?P<name>-?[A-Za-z_][\w.]*)|(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"""\\(n|t|r|\\|"|'|[0-7]{1,3}|x[0-9a-fA-F]{1,2})""")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_CLOSING = {"{": "}", "<": ">"}


LONGEST_NUMBER = 40


class Name(str):
    """A bare word: an enum value such as TYPE_FP32."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Field:
    """One value; `dims: [3, 32, 32]` is three fields of one line."""

    name: str
    value: Value
    line: int


@dataclass(frozen=True, slots=True)
class Message:
    """The fields between two braces, or of the whole file, in their order."""

    fields: tuple[Field, ...]
    line: int

    def all(self, name: str) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.name == name)

    def one(self, name: str) -> Field | None:
        """The last one counts, as it does for protobuf."""
        return next((field for field in reversed(self.fields) if field.name == name), None)

    def messages(self, name: str) -> tuple["Message", ...]:
        return tuple(field.value for field in self.all(name) if isinstance(field.value, Message))

    def message(self, name: str) -> "Message | None":
        return next(reversed(self.messages(name)), None)

    def text(self, name: str, default: str = "") -> str:
        field = self.one(name)
        return field.value if field is not None and isinstance(field.value, str) else default

    def number(self, name: str, default: int = 0) -> int:
        field = self.one(name)
        return field.value if field is not None and type(field.value) is int else default

    def line_of(self, name: str) -> int:
        """Where this field stands; the message itself when it is absent."""
        field = self.one(name)
        return self.line if field is None else field.line


class ParseError(BadInput):
    """The text breaks the grammar at `line`."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"line {line}: {what}")
        self.what, self.line = what, line


def parse(text: str) -> Message:
    """The fields of `text`; ParseError with the line for anything that is no text-format message."""
    reader = _Reader(list(_tokens(text)))
    try:
        return Message(tuple(reader.fields(closing=None)), 1)
    except RecursionError:
        raise ParseError("messages are nested too deep", 1) from None


def pbtxt_from(fields: Mapping[str, Plain]) -> str:
    """Text whose fields come in the given order; a list repeats its field, None is not a value."""
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
                wanted = f" or {closing!r}{hint}" if closing else ""
                raise ParseError(f"expected a field name{wanted}, got {token.text!r}", token.line)
            yield from self._values(token)
            if not self._accept(","):
                self._accept(";")

    def _values(self, name: _Token) -> Iterator[Field]:
        colon = self._accept(":")
        if self._accept("["):
            while not self._accept("]"):
                yield Field(name.text, self._value(name, colon=True), name.line)
                if not self._accept(",") and self._peek().text != "]":
                    raise ParseError(
                        f"expected ',' or ']' in {name.text}, got {self._peek().text!r}", self._peek().line
                    )
        else:
            yield Field(name.text, self._value(name, colon), name.line)

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
            return {"true": True, "false": False}.get(token.text, Name(token.text))
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
    if re.fullmatch(r"[-+]?[0-9]+", token.text):
        return int(token.text)
    if "x" in token.text.lower():
        return int(token.text, 16)
    return float(token.text.rstrip("fF"))


def _unquoted(token: _Token) -> str:
    def character(match: re.Match[str]) -> str:
        code = match.group(1)
        if code in _ESCAPED:
            return _ESCAPED[code]
        return chr(int(code[1:], 16) if code.startswith("x") else int(code, 8))

    return _ESCAPE.sub(character, token.text[1:-1])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


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
        return _quoted(value)
    return str(value)
