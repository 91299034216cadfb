"""Types of option values for command lines, recipes and Python, each of which checks values and parses texts.

The quantities of ground/quantity.py are such types, too.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Protocol

from ground.errors import BadInput
from ground.places import Url, place_from_text
from ground.quantity import quoted

CHANNELS = "channels"
"""The key of a value that is typed without a kind of site: it is for the channels of MLPs and of convolutions."""


class Values(Protocol):
    """A type of values: str() is its description in messages, `span` its placeholder in help, such as FILE."""

    @property
    def span(self) -> str: ...

    def holds(self, value: object) -> bool: ...

    def from_text(self, text: str) -> Any:
        """Parse a text; raise BadInput for a text that is no value of this type."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """The type of an option that takes one of some words; `on` and `off` are the words for True and False."""

    words: tuple[str, ...]
    on: str | None = None
    off: str | None = None

    def __str__(self) -> str:
        return f"{'true, false or ' if self.on else ''}one of {', '.join(self.words)}"

    @property
    def span(self) -> str:
        return "|".join(self.words)

    def holds(self, value: object) -> bool:
        return value in self.words

    def from_text(self, text: str) -> str:
        word = {"True": self.on, "False": self.off}.get(text) or text
        if word not in self.words:
            raise BadInput(f"{quoted(text)}: expected {self}")
        return word


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The type of values of class `kind` that the function `read` parses from texts."""

    span: str
    expected: str
    kind: type | UnionType
    read: Callable[[str], Any]
    or_whole: bool = False
    """True if a recipe may have a whole number in place of the text."""
    pattern: str = r"\S"
    """A regular expression that texts in recipes have to match."""

    def __str__(self) -> str:
        return self.expected

    def holds(self, value: object) -> bool:
        return isinstance(value, self.kind)

    def from_text(self, text: str) -> Any:
        return self.read(text)


def _no_flag(text: str) -> bool:
    raise BadInput(f"{quoted(text)}: expected true or false")


def text_of(span: str) -> ParsedText:
    """Return a type whose values are texts, in recipes not blank ones, with `span` as its placeholder in help."""
    return ParsedText(span=span, expected="a text that is not empty", kind=str, read=str)


TEXT = text_of("TEXT")
FLAG = ParsedText(span="", expected="true or false", kind=bool, read=_no_flag)


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """A Python value, such as an array of labels, in place of the path of a file."""

    value: Any


FILE, DIRECTORY, PATH = (
    ParsedText(span=span, expected="a text that is not empty", kind=Path, read=Path)
    for span in ("FILE", "DIRECTORY", "PATH")
)
PLACE = ParsedText(span="PATH|URL", expected=FILE.expected, kind=Path | Url, read=place_from_text)
FILE_OR_VALUES = ParsedText(span="FILE", expected=FILE.expected, kind=Path | InMemory, read=Path)
TABLE = ParsedText(span="json", expected="a table of arguments", kind=dict, read=str)
SERVED_NAME = ParsedText(
    span="NAME",
    expected="letters, digits, '_', '.' and '-', starting with a letter or digit",
    kind=str,
    read=str,
    pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z",
)
LICENCE = ParsedText(
    span="SPDX",
    expected="an SPDX expression, such as 'Apache-2.0', 'CC-BY-4.0 AND MIT' or 'LicenseRef-ours'",
    kind=str,
    read=str,
    pattern=r"\A[A-Za-z0-9.+() -]{1,500}\Z",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """The type of an option that may be repeated: a tuple with one item for each time."""

    each: Values = TEXT

    def __str__(self) -> str:
        return f"a list of {'texts' if self.each is TEXT else self.each}"

    @property
    def span(self) -> str:
        return self.each.span

    def holds(self, value: object) -> bool:
        return isinstance(value, tuple) and all(map(self.each.holds, value))

    def from_text(self, text: str) -> tuple[Any, ...]:
        return (self.each.from_text(text),)


@dataclass(frozen=True, slots=True)
class ByKind:
    """The type of a mapping from kinds of sites to values, such as mlp=64,head=16; any kind may be left out.

    If CHANNELS is one of the kinds, a value may be typed without a kind, and has the key CHANNELS.
    """

    kinds: Mapping[str, Values]

    def __str__(self) -> str:
        return f"{self._kinds_span}; or {self.kinds[CHANNELS]} alone" if CHANNELS in self.kinds else self._kinds_span

    @property
    def _kinds_span(self) -> str:
        return "; ".join(f"{kind}= {values}" for kind, values in self.kinds.items() if kind != CHANNELS)

    @property
    def span(self) -> str:
        how = "how" if CHANNELS in self.kinds else "n"
        by_kind = ",".join(f"{kind}={how}" for kind in self.kinds if kind != CHANNELS)
        return f"{how}|{by_kind}" if CHANNELS in self.kinds else by_kind

    def holds(self, value: object) -> bool:
        return isinstance(value, Mapping) and all(
            kind in self.kinds and self.kinds[kind].holds(each) for kind, each in value.items()
        )

    def from_text(self, text: str) -> dict[str, Any]:
        pairs = [part.strip(" ").rpartition("=") for part in text.split(",")]
        named = [(kind if sign else CHANNELS, word) for kind, sign, word in pairs]
        if not {kind for kind, _ in named} <= self.kinds.keys() or len(dict(named)) != len(named):
            raise BadInput(f"{quoted(text)}: expected, each at most once, {self}")
        return {kind: self._of(kind, word) for kind, word in named}

    def _of(self, kind: str, word: str) -> Any:
        try:
            return self.kinds[kind].from_text(word)
        except BadInput as error:
            by_kind = f", or {self._kinds_span}" if kind == CHANNELS else ""
            raise BadInput(f"{'' if kind == CHANNELS else f'{kind}='}{error}{by_kind}") from None


@dataclass(frozen=True, slots=True)
class ListOf:
    """The type of a tuple typed with commas; if `different`, texts with a value twice are refused."""

    each: Values
    example: str
    different: bool = True

    def __str__(self) -> str:
        return f"{self.each}, or several separated by commas, such as {self.example}"

    @property
    def span(self) -> str:
        return "x,x,..."

    def holds(self, value: object) -> bool:
        return isinstance(value, tuple) and all(map(self.each.holds, value))

    def from_text(self, text: str) -> tuple[Any, ...]:
        try:
            every = tuple(self.each.from_text(part.strip(" ")) for part in text.split(","))
        except BadInput as error:
            raise BadInput(f"{error}, or several separated by commas, such as {self.example}") from None
        if self.different and len(set(every)) != len(every):
            raise BadInput(f"{quoted(text)}: a value is given twice; give each once")
        return every


def literal(of: Values, word: str) -> str:
    """Return `word`, which follows an option in a message, as a literal of Python and TOML, "" if it is no value.

    Of "--heads square needs --attn" it makes 'square' with quotes; placeholders such as DIR are returned unchanged.
    """
    bare = word.strip("'")
    if re.fullmatch("[A-Z]+", bare):
        return bare
    if word == bare and bare.isalpha() and bare != "auto" and not isinstance(of, OneOf | ByKind):
        return ""
    try:
        of.from_text(bare)
    except BadInput:
        return ""
    return bare if re.fullmatch(r"[\d.e-]+", bare) else f"'{bare}'"
