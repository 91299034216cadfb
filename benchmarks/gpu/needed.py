"""What has to be installed for the GPU benchmark, and from which version on; asked before any of it is imported."""

import importlib.metadata
from collections.abc import Callable, Sequence

from corp_deploy.machine import FLOORS
from ground.vulnerabilities import version_numbers

NEEDED = ("torch", "timm", "numpy", "safetensors", "msgspec", "pillow", "click")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacks(found: Callable[[str], str | None] = version_of, needed: Sequence[str] = NEEDED) -> list[str]:
    """A line for each package that is absent or too old, with what to do; empty where nothing is."""
    lines = []
    for package in needed:
        version, floor = found(package), FLOORS[package]
        if version is None or version_numbers(version) < version_numbers(floor):
            lines.append(f"{package}: got {version or 'none'}, expected {floor} or newer")
    remedy = "install them; without a network, `pip install --target FOLDER` of wheels and PYTHONPATH=FOLDER"
    return [*lines, remedy] if lines else []
