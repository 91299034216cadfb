"""Texts that are more than values, from a package's templates."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def templates_of(package: str, *, is_html: bool = False, **more: Any) -> Environment:
    """The templates in the folder `templates` of a package: words of HTML are escaped, of other texts they go through
    filters. A name that is not given is an error.
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
