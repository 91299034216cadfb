"""manifest.json: what stands in a directory of results, which command made it, and with which versions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corp_deploy.families.preprocessing import recorded_preprocessing
from corp_deploy.machine import versions
from ground.files import sha256_of_file, write_json

NAME, MANIFEST_KIND = "manifest.json", "corp-deploy/manifest"


def manifest_of_directory(directory: Path, made_by: Mapping[str, str], *, command: str) -> dict[str, Any]:
    """Digest, size and making command of every file below the directory, the manifest itself aside, and how its dense
    model takes its images.

    `made_by` maps relative names to commands; a file that no command is known for is listed with an empty one.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != NAME)
    entries = {
        path.relative_to(directory).as_posix(): {
            "sha256": sha256_of_file(path),
            "size_bytes": path.stat().st_size,
            "made_by": made_by.get(path.relative_to(directory).as_posix(), ""),
        }
        for path in files
    }
    return {
        "kind": MANIFEST_KIND,
        "version": 1,
        "command": command,
        "versions": versions(),
        "preprocessing": recorded_preprocessing(directory / "dense" / "config.json"),
        "files": entries,
    }


def write_manifest(directory: Path, made_by: Mapping[str, str], *, command: str) -> None:
    """Write manifest.json of the directory."""
    write_json(directory / NAME, manifest_of_directory(directory, made_by, command=command))
