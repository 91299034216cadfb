"""Why a record was refused, in words: the entry by its path, what was got there, and what was expected."""

import json
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import inspect

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


def _inner(info: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The types of what a value of this type holds at a field, an index or, for `...`, any key."""
    match info:
        case inspect.UnionType():
            for each in info.types:
                yield from _inner(each, step)
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
        types = [inner for each in types for inner in _inner(each, step)]
    if key:
        return [each.key_type for each in types if isinstance(each, inspect.DictType)]
    return [each for info in types for each in (info.types if isinstance(info, inspect.UnionType) else [info])]


def _value_at(raw: Any, steps: Iterable[str]) -> Any:
    """UNSET where the path doesn't tell: through the keys of a mapping, or keys that stand twice."""
    for step in steps:
        try:
            raw = raw[int(step)] if isinstance(raw, list) else raw[step]
        except (LookupError, TypeError, ValueError):
            return msgspec.UNSET
    return raw


def _received(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _described(expected: str) -> str:
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
        received = _described(match[2] or "") if value is msgspec.UNSET else _received(value)
        return f"got {received}, expected {_described(match[1])}" if received else f"expected {_described(match[1])}"
    return problem.lower() if problem.endswith(" out of range") else problem


def refusal(error: msgspec.ValidationError, record: Any, raw: Any, *, where: str) -> str:
    """Where, at which entry, and what is wrong with it. `raw` is the document without types, UNSET where unknown."""
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
