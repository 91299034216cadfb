"""Changes of chance to a file that was whole: of one value in a document, of bytes anywhere."""

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([-1, 0, 10**19, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths_of(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every value inside one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from paths_of(inner, (*above, key))


def replaced(record: Any, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    changed: Any = record.copy()
    changed[path[0]] = replaced(record[path[0]], path[1:], value)
    return changed


WORDS = (b"\0", b"\xff\xff\xff\xff", b"\xff" * 8, b"\x7f\xff\xff\xff", b"-1", b"1e999", b"nan", b"../", b"/etc/passwd",
         b"{", b"[" * 50, b'"', b"\n", b"\x1b[2J", "\u202e".encode(), b"=", b"%s")  # fmt: skip
"""Pieces that parsers stumble over."""


@st.composite
def spliced(draw: st.DrawFn, whole: Sequence[bytes]) -> bytes:
    """One of these files with some of its bytes taken out, written over, or put in; or of others altogether."""
    content = draw(st.sampled_from(list(whole)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        taken = draw(st.sampled_from([0, 1, 4, 64, len(content)]))
        put = draw(st.sampled_from(WORDS) | st.binary(max_size=16))
        content = content[:start] + put + content[start + taken :]
    return content


@st.composite
def revalued(draw: st.DrawFn, document: Any) -> Any:
    """The document with one value of another kind, or without it."""
    path = draw(st.sampled_from(list(paths_of(document))))
    return replaced(document, path, draw(VALUES))
