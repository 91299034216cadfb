"""Pages that stand outside docs/ as pages of the site, and links that lead out of docs/ led anew."""

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
"""Where each of them stands on the site."""

_LINK = re.compile(r"\[([^\]\n]+(?:\n[^\]\n]+)?)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def led_anew(markdown: str, source: str, page: str) -> str:
    """The text of `source`, by its path in the repository, as the site's page `page`: links to pages lead there, those
    to other files of the repository are their words. Raises FileNotFoundError for a link to a file that isn't there.
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
    """One of them as the site has it."""
    return led_anew((ROOT / name).read_text(encoding="utf-8"), name, ROOT_PAGES[name])
