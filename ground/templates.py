"""Jinja environments for the templates of packages."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def template_environment(package: str, *, is_html: bool = False, **more: Any) -> Environment:
    """Return Jinja's environment of a package's folder `templates`; `is_html` escapes values, missing names fail."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=is_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **more,
    )
