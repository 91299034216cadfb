"""The keys of a recipe as tables: what may stand there and what holds where nothing does, from the typed recipe; what
it does, in the words of its declaration or, where a recipe takes it in its own form, of recipe.toml.
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, inspect, json

from benchmarks.pages.markdown import table
from corp_deploy.release.recipe import Recipe
from corp_deploy.release.recipe_file import SECTIONS
from corp_deploy.release.recipe_tables import TargetTable

MEANINGS = Path(__file__).with_name("recipe.toml")


@cache
def _own_meanings() -> dict[str, dict[str, str]]:
    return tomllib.loads(MEANINGS.read_text(encoding="utf-8"))


def meaning(section: str, key: str) -> str:
    """What a key does."""
    table = TargetTable if section == "targets" else SECTIONS[section]
    return _own_meanings().get(section, {}).get(key) or table.helps[key]


def _expected(kind: inspect.Type) -> list[str]:
    """The words by which a refusal says what was expected, without repeats."""
    if isinstance(kind, inspect.Metadata):
        return [str((kind.extra_json_schema or {}).get("description", ""))]
    if isinstance(kind, inspect.UnionType):
        return list(dict.fromkeys(words for each in kind.types for words in _expected(each)))
    return []


def _default(field: inspect.Field) -> str:
    if field.required:
        return "**needed**"
    value: Any = field.default_factory() if field.default_factory is not NODEFAULT else field.default
    return "-" if value in (None, (), {}) else f"`{json.encode(value).decode()}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def sections() -> Iterator[tuple[str, str, tuple[inspect.Field, ...]]]:
    """The recipe's tables: heading, name, keys."""
    whole = inspect.type_info(Recipe)
    assert isinstance(whole, inspect.StructType), whole
    for field in whole.fields:
        of_targets = isinstance(field.type, inspect.DictType)
        kind = field.type.value_type if isinstance(field.type, inspect.DictType) else field.type
        assert isinstance(kind, inspect.StructType), field
        heading = f"[{field.encode_name}.NAME]" if of_targets else f"[{field.encode_name}]"
        yield heading, field.encode_name, kind.fields


def recipe() -> str:
    """All tables of a recipe, a section each."""
    parts = []
    for heading, name, fields in sections():
        rows = [
            (f"`{field.encode_name}`", _cell(" or ".join(_expected(field.type))), _default(field),
             _cell(meaning(name, field.encode_name)))
            for field in fields
        ]  # fmt: skip
        said = _own_meanings().get(name, {}).get("", "")
        parts += [
            f"## `{heading}`",
            *([said] if said else []),
            table(("key", "value", "default", "what it does"), rows),
        ]
    return "\n\n".join(parts)
