"""The keys of a recipe as tables: what may stand there and what holds where nothing does, from the typed recipe; what
it does, in the words of its declaration or, where a recipe takes it in its own form, of recipe.toml.
"""

import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from msgspec import json

from benchmarks.pages.markdown import table
from corp_deploy.invocation.option import NEEDED
from corp_deploy.release.recipe import SECTIONS
from corp_deploy.release.recipe_keys import Key, keys_of
from corp_deploy.release.recipe_tables import TargetTable

MEANINGS = Path(__file__).with_name("recipe.toml")


@cache
def _own_meanings() -> dict[str, dict[str, str]]:
    return tomllib.loads(MEANINGS.read_text(encoding="utf-8"))


def meaning(section: str, key: Key) -> str:
    """What a key does."""
    return _own_meanings().get(section, {}).get(key.name) or key.option.help


def _default(key: Key) -> str:
    if key.default is NEEDED:
        return "**needed**"
    return "-" if key.default in (None, (), {}) else f"`{json.encode(key.default).decode()}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def sections() -> Iterator[tuple[str, str, Collection[Key]]]:
    """The recipe's tables: heading, name, keys."""
    for name, record in {**SECTIONS, "targets": TargetTable}.items():
        yield f"[{name}.NAME]" if name == "targets" else f"[{name}]", name, keys_of(record).values()


def recipe() -> str:
    """All tables of a recipe, a section each."""
    parts = []
    for heading, name, keys in sections():
        rows = [
            (f"`{key.name}`", _cell(str(key.schema["description"])), _default(key), _cell(meaning(name, key)))
            for key in keys
        ]
        said = _own_meanings().get(name, {}).get("", "")
        parts += [
            f"## `{heading}`",
            *([said] if said else []),
            table(("key", "value", "default", "what it does"), rows),
        ]
    return "\n\n".join(parts)
