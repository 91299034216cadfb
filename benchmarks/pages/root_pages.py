"""Pages outside docs/ as pages of the site, and links between them."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security/index.md",
    "ARCHITECTURE.md": "developing/architecture.md",
    "CONTRIBUTING.md": "developing/contributing.md",
    "benchmarks/results/reproduce_digits.md": "measured/papers-digits.md",
    "benchmarks/results/reproduce_procedural.md": "measured/papers-procedural.md",
}
"""The path of each page on the site."""

_LINK = re.compile(r"\[([^\]\n]+(?:\n[^\]\n]+)?)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def led_anew(markdown: str, source: str, page: str) -> str:
    """Return the text of the file `source` of the repository with links rewritten for the site's page `page`.

    A link to a file that is no page of the site becomes plain text.

    Raises:
        FileNotFoundError: A link leads to a file that doesn't exist.
    """
    here = posixpath.dirname(page) or "."

    def led(match: re.Match[str]) -> str:
        words, anchor = match[1], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{source}: a link to {target}, which is not there")
        if target not in ROOT_PAGES and not target.startswith("docs/"):
            return words
        at = ROOT_PAGES.get(target, target.removeprefix("docs/"))
        return f"[{words}]({posixpath.relpath(at, here)}{anchor})"

    return _LINK.sub(led, markdown)


def page_of_root(name: str) -> str:
    """Return the site's text of a page outside docs/."""
    return led_anew((ROOT / name).read_text(encoding="utf-8"), name, ROOT_PAGES[name])
