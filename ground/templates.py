"""Jinja templates of packages."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def template_environment(package: str, *, is_html: bool = False, **more: Any) -> Environment:
    """Return the environment of a package's folder `templates`, where missing names are errors.

    Values in HTML are escaped.
    """
    return Environment(
        loader=PackageLoader(package),
        autoescape=is_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **more,
    )
