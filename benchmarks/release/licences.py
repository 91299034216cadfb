"""The licences of the packages in constraints.txt, from the metadata of the installed ones.

python -m benchmarks.release.licences          writes docs/security/licences.md
python -m benchmarks.release.licences --check  fails for a licence that licences.toml does not allow, or an old page
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from packaging.utils import canonicalize_name

from benchmarks.pages.markdown import table
from ground.installed import InstalledPackage, installed_packages

ROOT = Path(__file__).resolve().parents[2]
WORDS, PAGE, PINNED = (
    Path(__file__).with_name("licences.toml"),
    ROOT / "docs" / "security" / "licences.md",
    ROOT / "constraints.txt",
)
HEAD = """# Licences of the packages that are installed

Of every package in `constraints.txt`, as its metadata says, by `python -m benchmarks.release.licences`, which writes
this page. A test fails for one that `benchmarks/release/licences.toml` does not allow. What a release ships is its own
models and records: none of these packages is part of it, `sbom.cdx.json` names those that it was made with.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The content of licences.toml: why each licence is allowed, and licences that metadata lack."""

    allowed: Mapping[str, str]
    unsaid: Mapping[str, str]

    def allows(self, expression: str) -> bool:
        """Return whether an alternative of the expression has only allowed licences."""
        return any(all(term in self.allowed for term in choice.split(" AND ")) for choice in expression.split(" OR "))

    def licence(self, package: InstalledPackage) -> str:
        return package.licence or self.unsaid.get(package.name, "")


def policy() -> Policy:
    return Policy(**tomllib.loads(WORDS.read_text(encoding="utf-8")))


def pinned() -> dict[str, str]:
    """Return the versions in constraints.txt by name."""
    lines = (line.strip() for line in PINNED.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def refused(packages: Sequence[InstalledPackage], by: Policy) -> list[str]:
    """Return packages whose licence is unknown or not allowed."""
    return [
        f"{each.name} {each.version}: {by.licence(each) or 'says no licence'}"
        for each in packages
        if not by.allows(by.licence(each))
    ]


def page(packages: Sequence[InstalledPackage], by: Policy) -> str:
    """Return the text of docs/security/licences.md."""
    rows = [(each.name, each.version, by.licence(each)) for each in packages]
    reasons = table(("licence", "why it may be"), [(f"`{name}`", why) for name, why in by.allowed.items()])
    return "\n".join([HEAD, reasons, "", table(("package", "version", "licence"), rows), ""])


def ours() -> list[InstalledPackage]:
    """Return the installed packages of constraints.txt."""
    known = pinned()
    return [each for each in installed_packages() if each.name in known]


@click.command()
@click.option("--check", is_flag=True, help="Fail where a licence is not allowed, or the page is old.")
def main(check: bool) -> None:
    """Write docs/security/licences.md."""
    packages, by = ours(), policy()
    if wrong := refused(packages, by):
        raise click.ClickException("\n".join(wrong))
    if absent := pinned().keys() - {each.name for each in packages}:
        raise click.ClickException(f"not installed, so that the page would lack them: {', '.join(sorted(absent))}")
    if not check:
        PAGE.write_text(page(packages, by), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page(packages, by):
        raise click.ClickException(f"{PAGE.name} is out of date; run python -m benchmarks.release.licences")


if __name__ == "__main__":
    main()
