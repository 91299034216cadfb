"""The site: it builds without a warning, shows every command, key and code, and leads nowhere that isn't there."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from msgspec import json

import corp_deploy
from benchmarks.pages.root_pages import led_anew
from corp_deploy import cli
from corp_deploy.cli import main
from corp_deploy.invocation.option import NEEDED
from corp_deploy.release.recipe import SECTIONS
from corp_deploy.release.recipe_keys import Key, keys_of
from corp_deploy.release.recipe_tables import TargetTable

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"


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
def test_site_links_resolve(site: Path) -> None:
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
def test_site_loads_nothing_external_and_links_by_https(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text_of(page)):
            assert not re.search(r'\b(?:src|href)="(?:https?:)?//', tag), (page.name, tag)
        for link in re.findall(r'<a\b[^>]*href="(http[^"]*)"', text_of(page)):
            assert link.startswith("https://"), (page.name, link)


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_site_shows_every_option_of_every_command(site: Path) -> None:
    built = {page: html.unescape(text_of(page)) for page in (site / "reference" / "commands").glob("*.html")}
    for name, command in main.commands.items():
        anchor = f'id="corp-deploy-{name.replace(" --", "-").replace(" ", "-")}"'
        [text] = [text for text in built.values() if anchor in text]
        section = text.partition(anchor)[2].partition("<h2")[0]
        for option in command.params:
            assert all(each in section for each in option.opts if each.startswith("--")), (name, option)


def test_every_command_and_public_name_has_a_reference() -> None:
    shown = [text_of(page) for page in sorted((REFERENCE / "commands").glob("*.md"))]
    named = dict(re.findall(r"^    :command: (\w+)\n    :prog_name: corp-deploy (.+)$", "\n".join(shown), re.MULTILINE))
    listed = re.findall(r"^\| \[`([^`]+)`\]", text_of(REFERENCE / "commands" / "index.md"), re.MULTILINE)
    assert {getattr(cli, attribute).name: name for attribute, name in named.items()} == {
        name: name for name in main.commands
    }
    assert listed == list(main.commands)
    public = re.findall(r"^::: corp_deploy\.(\w+)$", text_of(REFERENCE / "python.md"), re.MULTILINE)
    assert sorted(public) == sorted(corp_deploy.__all__)


def default_of(key: Key) -> str:
    if key.default is NEEDED:
        return "**needed**"
    return "-" if key.default in (None, (), {}) else f"`{json.encode(key.default).decode()}`"


def test_every_recipe_key_is_documented_with_its_default() -> None:
    _, *parts = re.split(r"^## `", text_of(REFERENCE / "recipe.md"), flags=re.MULTILINE)
    told = {
        part.partition("`")[0]: re.findall(r"^\| `(\w+)` \|.*?(?<!\\)\| ([^|]+) \| [^|]+", part, re.MULTILINE)
        for part in parts
    }
    for name, record in {**SECTIONS, "targets": TargetTable}.items():
        heading = f"[{name}.NAME]" if name == "targets" else f"[{name}]"
        assert told[heading] == [(key.name, default_of(key)) for key in keys_of(record).values()]


def test_exit_codes_equal_those_of_the_help() -> None:
    words = re.search(r"Exit codes: (.*)", (main.help or "").replace("\n", " "))
    assert words
    told = re.findall(r"^\| `(\d+)` \|", text_of(REFERENCE / "exit-codes.md"), re.MULTILINE)
    assert sorted(map(int, told)) == sorted(map(int, re.findall(r"\b\d+\b", words[1])))


def test_broken_link_is_an_error() -> None:
    assert led_anew("[a](docs/start.md#x) [b](pyproject.toml)", "README.md", "x/y.md") == "[a](../start.md#x) b"
    assert led_anew("[s](../SECURITY.md)", "docs/start.md", "start.md") == "[s](security/index.md)"
    with pytest.raises(FileNotFoundError, match=r"docs/start\.md: a link to docs/gone\.md"):
        led_anew("[a](gone.md)", "docs/start.md", "start.md")


def test_links_between_root_files_resolve() -> None:
    for page in sorted(ROOT.glob("*.md")):
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text_of(page)):
            assert (ROOT / link).exists(), (page.name, link)
