"""A bill of materials in CycloneDX 1.6: what installed packages are, under which licences, what needs what.

Nothing in it says when it was written: the same environment gives the same bytes.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from .installed import Package

SCHEMA, VERSION = "http://cyclonedx.org/schema/bom-1.6.schema.json", "1.6"
OWN_REFERENCE = "LicenseRef-"
_SPACE = uuid.UUID("6f0c1c5e-6d4f-5e1b-9f57-1b2a5c0a9d11")


def licences(expression: str) -> list[dict[str, Any]]:
    """The entry `licenses` for an SPDX expression; a licence that SPDX doesn't know goes by name, none by nothing."""
    if not expression:
        return []
    if expression.startswith(OWN_REFERENCE) and " " not in expression:
        return [{"license": {"name": expression.removeprefix(OWN_REFERENCE)}}]
    return [{"expression": expression}]


def _reference(package: Package) -> str:
    return f"pkg:pypi/{package.name}@{package.version}"


def component(package: Package) -> dict[str, Any]:
    """A library."""
    told = licences(package.licence)
    return {
        "type": "library",
        "bom-ref": _reference(package),
        "name": package.name,
        "version": package.version,
        **({"licenses": told} if told else {}),
        "purl": _reference(package),
    }


def dependencies(packages: Sequence[Package]) -> list[dict[str, Any]]:
    """What each needs of those that are there."""
    by_name = {package.name: _reference(package) for package in packages}
    return [
        {"ref": _reference(each), "dependsOn": [by_name[name] for name in each.requires if name in by_name]}
        for each in packages
    ]


def bill(
    subject: Mapping[str, Any],
    components: Sequence[Mapping[str, Any]],
    packages: Sequence[Package],
    *,
    tool: Mapping[str, Any],
    needs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The whole bill: `subject` is what it is of, `components` are what that has beside the packages, `needs` the
    dependencies among these. The serial number follows from the content.
    """
    content = {
        "metadata": {"tools": {"components": [dict(tool)]}, "component": dict(subject)},
        "components": [*map(dict, components), *map(component, packages)],
        "dependencies": [*map(dict, needs), *dependencies(packages)],
    }
    serial = uuid.uuid5(_SPACE, json.dumps(content, sort_keys=True))
    head = {"$schema": SCHEMA, "bomFormat": "CycloneDX", "specVersion": VERSION, "serialNumber": f"urn:uuid:{serial}"}
    return {**head, "version": 1, **content}
