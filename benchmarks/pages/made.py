"""What pages of docs/ have of the code, between marker lines: as plain Markdown, for who reads it on a code host. The
site makes it anew, with what a code host doesn't show: definition lists, anchors, cross-references.

`<!-- made: NAME -->` begins a table of TABLES, `<!-- made: command NAME -->` a command's options, `<!-- made: function
NAME -->` a function's parameters, `<!-- made: object NAME -->` what mkdocstrings shows on the site.

python -m benchmarks.pages.made            writes the pages
python -m benchmarks.pages.made --check    fails when one is not what the code says
"""

import re
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.pages.commands import command, commands
from benchmarks.pages.exit_codes import exit_codes
from benchmarks.pages.functions import function
from benchmarks.pages.installed import installed
from benchmarks.pages.recipe import recipe
from benchmarks.pages.worked import worked

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "exit codes": exit_codes,
    "installed": installed,
    "recipe": recipe,
    "worked example": worked,
}
BEGIN, END = "<!-- made: ", "<!-- /made -->"
_MADE = re.compile(rf"^{BEGIN}(?P<name>[\w -]+?) -->\n(?:(?!{BEGIN}).)*?^{END}$", re.MULTILINE | re.DOTALL)
_LEFT = re.compile(rf"^(?:{BEGIN}[\w -]*-->|{END})$", re.MULTILINE)
_DEFINED = re.compile(r"^(`[^\n]+`)\n:   ", re.MULTILINE)
_PARAMETER = re.compile(r"(?<=\n\n)(`\w+`: [^\n]*)(?=\n\n|\Z)")
_ANCHOR = re.compile(r" \{ #[\w.]+ \}$", re.MULTILINE)


def on_site(name: str) -> str:
    """What the site has for a mark. Raises ValueError for a name that is none."""
    kind, _, rest = name.partition(" ")
    if kind == "object":
        return f"::: corp_deploy.{rest}"
    if kind in ("command", "function"):
        return command(rest) if kind == "command" else function(rest)
    if name not in TABLES:
        raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]()


def _listed(text: str) -> str:
    """Options and parameters as items of one list, headings without attributes: Markdown that any host renders."""
    plain = _ANCHOR.sub("", _PARAMETER.sub(r"* \1", _DEFINED.sub(r"* \1: ", text)))
    first, *others = plain.split("\n\n")
    before, whole = first, first
    for part in others:
        is_next_item = before.startswith("* ") and part.startswith("* ")
        whole += ("\n" if is_next_item else "\n\n") + part
        before = part
    return whole


def in_repository(name: str) -> str:
    """The same as the repository has it."""
    kind, _, rest = name.partition(" ")
    return _listed(function(rest) if kind == "object" else on_site(name))


def for_site(markdown: str) -> str:
    """A page with the site's text in place of the repository's, marks and all. Raises ValueError for a mark without an
    end.
    """
    whole = _MADE.sub(lambda mark: on_site(mark["name"]), markdown)
    if left := _LEFT.search(whole):
        raise ValueError(f"{left[0]} stands without {END} below it")
    return whole


def for_repository(markdown: str) -> str:
    """A page with what stands between its marks made anew."""
    return _MADE.sub(lambda mark: f"{BEGIN}{mark['name']} -->\n\n{in_repository(mark['name'])}\n\n{END}", markdown)


def without_made(markdown: str) -> str:
    """What somebody wrote of a page."""
    return _MADE.sub("", markdown)


def marked_pages() -> dict[str, Path]:
    """The pages with such marks, by their paths below docs/."""
    pages = sorted(path for path in DOCS.rglob("*.md") if f"\n{BEGIN}" in path.read_text(encoding="utf-8"))
    return {path.relative_to(DOCS).as_posix(): path for path in pages}


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a page differs.")
def main(check: bool) -> None:
    """Bring the pages up to the code."""
    for name, path in marked_pages().items():
        text = path.read_text(encoding="utf-8")
        made = for_repository(text)
        if check and made != text:
            raise click.ClickException(f"docs/{name} differs from the code; run python -m benchmarks.pages.made")
        if not check:
            path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
