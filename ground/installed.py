"""The installed Python packages with their licences as SPDX expressions."""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .files import sha256_of_text

# SPDX identifiers of licences as packages word them in their metadata or classifiers.
_SPDX: Mapping[str, str] = MappingProxyType(
    {
        "3-Clause BSD License": "BSD-3-Clause",
        "Apache 2.0": "Apache-2.0",
        "Apache 2.0 License": "Apache-2.0",
        "Apache License": "Apache-2.0",
        "Apache Software License": "Apache-2.0",
        "BSD": "BSD-3-Clause",
        "BSD 2-Clause License": "BSD-2-Clause",
        "BSD License": "BSD-3-Clause",
        "ISC License": "ISC",
        "ISC License (ISCL)": "ISC",
        "MIT License": "MIT",
        "MIT license": "MIT",
        "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
        "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
        "Other/Proprietary License": "LicenseRef-Proprietary",
        "PSFL": "PSF-2.0",
        "Proprietary": "LicenseRef-Proprietary",
        "Python Software Foundation License": "PSF-2.0",
        "The Unlicense (Unlicense)": "Unlicense",
    }
)
_EXPRESSION = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")
_CLASSIFIER = "License :: "


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    name: str
    """In small letters, with '-' between words."""
    version: str
    licence: str
    """An SPDX expression, empty if unknown."""
    requires: tuple[str, ...]
    """Names of required distributions, without those of extras."""
    record_sha256: str | None = None
    """Digest of RECORD, the list of the distribution's files with their digests."""


def normalised_licence(expression: str) -> str | None:
    """Return an SPDX expression in SPDX's spelling; None if it is invalid or has an unknown licence."""
    try:
        return canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        return None


def _first_field(metadata: importlib.metadata.PackageMetadata, name: str) -> str:
    return str((metadata.get_all(name) or [""])[0]).strip()


def _find_licence(metadata: importlib.metadata.PackageMetadata) -> str:
    if expression := _first_field(metadata, "License-Expression"):
        return expression
    licence = _first_field(metadata, "License")
    if licence in _SPDX:
        return _SPDX[licence]
    classifiers = [each.removeprefix(_CLASSIFIER) for each in metadata.get_all("Classifier") or ()]
    classified = {_SPDX.get(each.rpartition(" :: ")[2], "") for each in classifiers} - {""}
    if _EXPRESSION.fullmatch(licence) and licence != "UNKNOWN":
        return licence
    return " AND ".join(sorted(classified))


def _required(requirements: Iterable[str]) -> Iterator[str]:
    """Yield the names of requirements that need no extra, for any platform, skipping those that can't be parsed."""
    for text in requirements:
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if "extra" not in str(requirement.marker):
                yield canonicalize_name(requirement.name)


def installed_packages() -> tuple[InstalledPackage, ...]:
    """Return the installed distributions, sorted by name; of several of one name, the one that is imported."""
    packages: dict[str, InstalledPackage] = {}
    for found in importlib.metadata.distributions():
        name = canonicalize_name(_first_field(found.metadata, "Name"))
        record = found.read_text("RECORD")
        package = InstalledPackage(
            name=name,
            version=found.version,
            licence=_find_licence(found.metadata),
            requires=tuple(sorted({*_required(found.requires or ())} - {name})),
            record_sha256=None if record is None else sha256_of_text(record),
        )
        if name:
            packages.setdefault(name, package)
    return tuple(packages[name] for name in sorted(packages))
