"""What GitHub and citing tools read of the project: changelog, citation, issue forms; well formed, of one version."""

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from corp_deploy import __version__
from corp_deploy.cli import main

yaml: Any = pytest.importorskip("yaml", reason="PyYAML, which comes with mkdocs, is not installed")
ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_changelog_begins_with_unreleased_and_this_version() -> None:
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert heads[0] == ("Unreleased", "")
    assert heads[1][0] == __version__ == tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    dates = [date.fromisoformat(day) for _, day in heads[1:]]
    versions = [tuple(map(int, version.split("."))) for version, _ in heads[1:]]
    assert (dates, versions) == (sorted(dates, reverse=True), sorted(set(versions), reverse=True))


def test_changelog_uses_standard_headings_and_names_every_command() -> None:
    text = text_of("CHANGELOG.md")
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= set(CHANGES)
    assert set(main.commands) <= set(re.findall(r"`([a-z -]+)`", text))
    for path in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / path).is_file(), path


def test_options_in_the_changelog_exist() -> None:
    ours = {option for command in main.commands.values() for each in command.params for option in each.opts}
    ours |= {"--help", "--help-all"}
    assert set(re.findall(r"`(--[a-z-]+)", text_of("CHANGELOG.md"))) <= ours


def test_citation_is_valid_and_of_this_version() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["type"]) == (project["name"], "software")
    assert (str(citation["version"]), citation["license"]) == (__version__, project["license"])
    assert citation["authors"] == [{"name": "The corp-deploy developers"}]
    assert all(citation[key] for key in ("message", "abstract"))
    known = {"cff-version", "message", "type", "title", "abstract", "authors", "version", "license", "keywords",
             "references"}  # fmt: skip
    assert citation.keys() <= known
    titles = [each["title"].partition(":")[0] for each in citation["references"]]
    assert titles == ["CORP", "GRAIL"]
    for each in citation["references"]:
        assert each["type"] in ("article", "conference-paper")
        assert all(person["family-names"] and person["given-names"] for person in each["authors"])
        assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", each["url"])


def test_vulnerabilities_are_reported_privately() -> None:
    config = loaded(TEMPLATES / "config.yml")
    assert config["blank_issues_enabled"] is False
    (link,) = config["contact_links"]
    assert set(link) == {"name", "url", "about"}
    assert link["url"].startswith("https://")
    assert "SECURITY.md" in link["about"]
    assert "SECURITY.md" in (TEMPLATES / "bug.yml").read_text()
    assert "SECURITY.md" in text_of(".github/PULL_REQUEST_TEMPLATE.md")


def test_pull_request_template_asks_for_the_projects_rules() -> None:
    text = text_of(".github/PULL_REQUEST_TEMPLATE.md")
    for path in re.findall(r"`([\w./]+/?)`", text):
        assert (ROOT / path).exists() or path == "make", path
