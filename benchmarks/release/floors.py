"""The lowest versions that the package allows, from its wheel's metadata, as constraints for pip.

Every lower bound is a version that exists, so `name==X` can replace `name>=X`. pip finds indirect requirements.
"""

import tomllib
from collections.abc import Iterable
from email.parser import BytesParser

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.release.licences import ROOT, pinned

# Users of the package install none of these.
DEVELOPING = {"dev", "docs"}
# No test needs these.
LINTERS = {"import-linter", "mypy", "ruff"}


def _fields(core_metadata: bytes, name: str) -> list[str]:
    return list(map(str, BytesParser().parsebytes(core_metadata).get_all(name) or ()))


def extras(core_metadata: bytes) -> set[str]:
    return set(_fields(core_metadata, "Provides-Extra"))


def requirements(core_metadata: bytes, *of: str) -> list[Requirement]:
    """Return the requirements on this platform, including those of these extras."""
    return [
        each
        for each in map(Requirement, _fields(core_metadata, "Requires-Dist"))
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *of))
    ]


def floors(asked: Iterable[Requirement]) -> dict[str, str]:
    """Return the lowest version of each requirement. Raises ClickException unless each has one lower bound."""
    lowest: dict[str, str] = {}
    for each in asked:
        name, clauses = canonicalize_name(each.name), list(each.specifier)
        if [clause.operator for clause in clauses] != [">="]:
            raise click.ClickException(f"{each.name}: expected one lower bound, got {str(each.specifier)!r}")
        if lowest.setdefault(name, clauses[0].version) != clauses[0].version:
            raise click.ClickException(f"{name}: two floors, {lowest[name]} and {clauses[0].version}")
    return lowest


def _building() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [Requirement(line) for line in project["build-system"]["requires"]]


def testing(core_metadata: bytes) -> list[Requirement]:
    """Return the further requirements of the tests, including those to build the wheel."""
    dev = [each for each in requirements(core_metadata, *DEVELOPING) if each.marker is not None]
    return [*(each for each in dev if canonicalize_name(each.name) not in LINTERS), *_building()]


def constraints(core_metadata: bytes) -> str:
    """Return constraints: every direct requirement at its lower bound, tools of the tests as in constraints.txt."""
    lowest = floors([*requirements(core_metadata, *extras(core_metadata) - DEVELOPING), *_building()])
    tools = {canonicalize_name(each.name) for each in testing(core_metadata)}
    held = {name: version for name, version in pinned().items() if name in tools} | lowest
    return "".join(f"{name}=={version}\n" for name, version in sorted(held.items()))
