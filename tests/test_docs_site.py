"""The site: it builds without a warning, shows every command, key and code, and leads nowhere that isn't there."""

import html
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import corp_deploy
from benchmarks.pages import recipe
from benchmarks.pages.commands import anchor, pages_of_commands
from benchmarks.pages.exit_codes import CODES
from benchmarks.pages.made import BEGIN, END, for_repository, for_site, marked_pages, without_made
from benchmarks.pages.root_pages import led_anew
from corp_deploy.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, built as `make docs` builds them: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    own = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=own)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    built = sorted(site.rglob("*.html"))
    assert len(built) > 15
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text_of(page))) for page in built}
    lost = []
    for page in built:
        for found in re.findall(r'\b(?:href|src)="([^"]*)"', text_of(page)):
            link = urlsplit(html.unescape(found))
            if link.scheme or not (link.path or link.fragment) or page.name == "404.html":
                continue
            target = (page.parent / unquote(link.path)).resolve() if link.path else page
            if not target.is_file() or (link.fragment and target in ids and unquote(link.fragment) not in ids[target]):
                lost.append(f"{page.relative_to(site)}: {found}")
    assert lost == []


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_the_site_asks_no_other_host_and_leads_to_others_by_https(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text_of(page)):
            assert not re.search(r'\b(?:src|href)="(?:https?:)?//', tag), (page.name, tag)
        for link in re.findall(r'<a\b[^>]*href="(http[^"]*)"', text_of(page)):
            assert link.startswith("https://"), (page.name, link)


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_every_command_is_shown_once_with_all_its_options(site: Path) -> None:
    shown = [name for names in pages_of_commands().values() for name in names]
    assert sorted(shown) == sorted(main.commands)
    for page, names in pages_of_commands().items():
        built = text_of(site / "reference" / "commands" / page.replace(".md", ".html")) if names else ""
        for name in names:
            assert f'id="{anchor(name)}"' in built
            for option in main.commands[name].params:
                assert all(html.escape(each) in built for each in option.opts if each.startswith("--")), (name, option)


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_every_key_of_a_recipe_is_shown(site: Path) -> None:
    built = text_of(site / "reference" / "recipe.html")
    for heading, _, keys in recipe.sections():
        assert html.escape(heading) in built
        for key in keys:
            assert f"<code>{key.name}</code>" in built, key


@pytest.mark.parametrize("name", marked_pages())
def test_the_repository_has_what_the_code_says(name: str) -> None:
    text = text_of(marked_pages()[name])
    made = for_repository(text)
    assert made == text, "run python -m benchmarks.pages.made"
    assert len(text) < 60_000
    assert BEGIN not in without_made(text)
    assert "\n:   " not in made, "definition lists are not Markdown on a code host"
    assert "\n::: " not in made, "only the site has cross-references"


def test_all_that_is_public_stands_on_the_page_of_python() -> None:
    text = text_of(marked_pages()["reference/python.md"])
    assert sorted(re.findall(r"^## `corp_deploy\.(\w+)`$", text, re.MULTILINE)) == sorted(corp_deploy.__all__)


def test_what_is_made_of_the_code_is_told_from_what_is_written() -> None:
    page = f"before\n\n{BEGIN}exit codes -->\n\nold\n\n{END}\n\nbetween\n\n{BEGIN}object load -->\n{END}\nbehind\n"
    assert without_made(page) == "before\n\n\n\nbetween\n\n\nbehind\n"
    assert for_site(page).endswith("\n\nbetween\n\n::: corp_deploy.load\nbehind\n")
    made = for_repository(page)
    assert "old" not in made
    assert for_repository(made) == made
    assert for_site(made) == for_site(page)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (f"{BEGIN}exit codes -->\n", f"exit codes --> stands without {END} below it"),
        (f"{BEGIN}exit codes -->\n{BEGIN}recipe -->\n{END}\n", f"exit codes --> stands without {END} below it"),
        (f"{END}\n", "stands without"),
        (f"{BEGIN}nothing -->\n{END}\n", "no table is called 'nothing'; there are commands, exit codes"),
    ],
)
def test_a_mark_of_nothing_or_without_an_end_is_refused(page: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        for_site(page)


def test_every_key_is_explained_and_recipe_toml_explains_no_other() -> None:
    assert all(recipe.meaning(section, key) for _, section, keys in recipe.sections() for key in keys)
    explained = tomllib.loads(recipe.MEANINGS.read_text())
    assert {(section, key) for section, own in explained.items() for key in own if key} <= {
        (section, key.name) for _, section, keys in recipe.sections() for key in keys
    }


def test_the_exit_codes_are_those_of_the_help() -> None:
    words = re.search(r"Exit codes: (.*)", (main.help or "").replace("\n", " "))
    assert words
    assert sorted(CODES) == sorted(map(int, re.findall(r"\b\d+\b", words[1])))


def test_a_link_to_what_is_not_there_is_an_error() -> None:
    assert led_anew("[a](docs/start.md#x) [b](pyproject.toml)", "README.md", "x/y.md") == "[a](../start.md#x) b"
    assert led_anew("[s](../SECURITY.md)", "docs/start.md", "start.md") == "[s](security/index.md)"
    with pytest.raises(FileNotFoundError, match=r"docs/start\.md: a link to docs/gone\.md"):
        led_anew("[a](gone.md)", "docs/start.md", "start.md")


def test_links_between_the_files_at_the_root_lead_somewhere() -> None:
    for page in sorted(ROOT.glob("*.md")):
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text_of(page)):
            assert (ROOT / link).exists(), (page.name, link)
