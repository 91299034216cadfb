"""Texts of a release that are more than values, from the templates beside this file. Imports no torch."""

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
    text = tomli_w.dumps(content)
    odd = {each for each in text if each != "\n" and printable(each) != each}
    return text.translate({ord(each): f"\\u{ord(each):04x}" for each in odd})


@cache
def _environment() -> Environment:
    """Templates of texts that are no HTML: words go through `toml`, `sh` (those of a command) or `comment`."""

    def toml(text: str) -> str:
        return toml_from({"text": text}).removeprefix("text = ").rstrip("\n")

    environment = templates_of("corp_deploy.release")
    environment.filters |= {"toml": toml, "sh": shlex.join, "comment": one_line}
    return environment


def rendered(template: str, **content: Any) -> str:
    """A template filled in."""
    return _environment().get_template(f"{template}.jinja").render(content)
