"""Words that were given up for the field's terms don't come back: `words.toml` has each with what to say instead."""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import ROOMS, ROOT, trees

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
NAMES: Mapping[str, Mapping[str, str]] = {" ".join(ROOMS): WORDS["names"], **WORDS["rooms"]}
PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/**/*.md")
INSTEAD = {phrase.lower(): instead for phrase, instead in WORDS["phrases"].items()}
WRITTEN = "|".join(r"\s+".join(map(re.escape, phrase.split())) for phrase in INSTEAD)
PHRASES = re.compile(rf"\b(?:{WRITTEN})\b", re.IGNORECASE)
Places = Iterator[tuple[str, int]]


def names_in(tree: ast.AST) -> Places:
    """Names of functions, classes, parameters and fields, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def texts_in(tree: ast.AST) -> Places:
    """Docstrings, help texts and messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def phrases_in(texts: Places) -> Places:
    """Each phrase with its line, found over the ends of lines too."""
    for text, line in texts:
        for match in PHRASES.finditer(text):
            yield " ".join(match[0].lower().split()), line + text.count("\n", 0, match.start())


def given_up(tree: ast.Module, file: Path, names: Mapping[str, str]) -> Iterator[str]:
    places = [(file.stem, 1), *names_in(tree)]
    for name, line in sorted(places, key=lambda place: place[1]):
        if instead := names.get(name.strip("_")):
            yield f"{file}:{line}: {name} was given up; say {instead}"


def test_names_that_were_given_up_stay_gone() -> None:
    found = [
        each
        for rooms, names in NAMES.items()
        for path, tree in trees(*rooms.split()).items()
        for each in given_up(tree, path, names)
    ]
    assert not found, "\n".join(found)


def test_phrases_that_were_given_up_stay_gone() -> None:
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    texts = {page.relative_to(ROOT): iter([(page.read_text(encoding="utf-8"), 1)]) for page in pages}
    texts |= {path: texts_in(tree) for path, tree in trees().items()}
    found = [
        f"{path}:{line}: '{phrase}' was given up; {INSTEAD[phrase]}"
        for path, each in texts.items()
        for phrase, line in phrases_in(each)
    ]
    assert not found, "\n".join(found)


def test_a_name_is_found_wherever_it_is_bound() -> None:
    source = (
        "class Told:\n    told: int\n\n    def _told(self, told: int) -> None:\n        self.told = told\n\n"
        "def kept(untold: int) -> int:\n    return untold\n"
    )
    found = list(given_up(ast.parse(source), Path("calib/told.py"), {"told": "the settings", "Told": "Settings"}))
    assert [each.split(": ")[0] for each in found] == [f"calib/told.py:{line}" for line in (1, 1, 2, 4, 4, 5)]
    assert found[2] == "calib/told.py:2: told was given up; say the settings"


def test_a_phrase_is_found_over_the_end_of_a_line() -> None:
    text = "A note.\nIt has what\n    is said of the inputs. Whatever is said of it stays."
    assert list(phrases_in(iter([(text, 7)]))) == [("what is said of", 8)]
