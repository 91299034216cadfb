"""Texts of a release that are more than values, from the templates beside this file. Imports no torch."""

import shlex
from functools import cache
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from ground.text import one_line


def toml_text(text: str) -> str:
    """A text as TOML writes it, quoted."""
    return tomli_w.dumps({"text": text}).removeprefix("text = ").rstrip("\n")


@cache
def _environment() -> Environment:
    """Templates of texts that are no HTML: words go through `toml`, `sh` (those of a command) or `comment`."""
    environment = Environment(
        loader=PackageLoader("corp_deploy.release"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"toml": toml_text, "sh": shlex.join, "comment": one_line}
    return environment


def rendered(template: str, **content: Any) -> str:
    """A template filled in."""
    return _environment().get_template(f"{template}.jinja").render(content)
