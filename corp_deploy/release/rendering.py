"""Texts of a release that are more than values, from the templates beside this file. Imports no torch."""

import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

import tomli_w
from jinja2 import Environment

from ground.templates import templates_of
from ground.text import one_line, printable


def toml_from(content: Mapping[str, Any]) -> str:
    """TOML; characters that would not be shown as they are by their numbers."""
    return re.sub(r"[^ -~\n]", _by_number, tomli_w.dumps(content))


def _by_number(character: re.Match[str]) -> str:
    return character[0] if printable(character[0]) == character[0] else f"\\u{ord(character[0]):04x}"


def toml_text(text: str) -> str:
    """A text as TOML writes it, quoted."""
    return toml_from({"text": text}).removeprefix("text = ").rstrip("\n")


@cache
def _environment() -> Environment:
    """Templates of texts that are no HTML: words go through `toml`, `sh` (those of a command) or `comment`."""
    environment = templates_of("corp_deploy.release")
    environment.filters |= {"toml": toml_text, "sh": shlex.join, "comment": one_line}
    return environment


def rendered(template: str, **content: Any) -> str:
    """A template filled in."""
    return _environment().get_template(f"{template}.jinja").render(content)
