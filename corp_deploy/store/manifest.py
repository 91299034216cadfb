"""manifest.json: what stands in a directory of results, which command made it, and with which versions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corp_deploy.machine import versions
from ground.effort import is_effort
from ground.files import sha256_of_file, write_json
from ground.records import record_from_file

from .model_config import ModelConfig, load_model_config

NAME, MANIFEST_KIND = "manifest.json", "corp-deploy/manifest"
AGAIN = "make the directory again with `corp-deploy release`, `package` or `demo`"


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its digest, and the command that made it, empty where none is known."""

    sha256: str
    made_by: str


class ReleaseName(msgspec.Struct, frozen=True, kw_only=True):
    """What a release is called; a version where its recipe gives one."""

    name: str
    version: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a manifest; `release` in that of a release alone."""

    versions: dict[str, Any]
    files: dict[str, ManifestEntry]
    release: ReleaseName | None = None


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a directory. Raises BadInput, naming the entry, when it is none."""
    return record_from_file(directory / NAME, Manifest, kind=MANIFEST_KIND, remedy=AGAIN)


def entry_of(path: Path, made_by: str = "") -> dict[str, Any]:
    """The entry of a file: its digest and size, and the command that made it."""
    return {"sha256": sha256_of_file(path), "size_bytes": path.stat().st_size, "made_by": made_by}


def entries_of_model(reduced: ModelConfig) -> dict[str, Any]:
    """What a manifest says of a model that merges tokens or gives outputs by name, nothing of another one."""
    tokens = {} if reduced.merging is None else {"tokens": reduced.merging.merging.describe()}
    outputs = {} if reduced.outputs is None else {"outputs": list(reduced.outputs)}
    return {**tokens, **outputs}


def input_of_graphs(directory: Path) -> dict[str, Any]:
    """Nothing of graphs that take what the preprocessing gives; else that they take its pixels, and where those are
    normalised.
    """
    from .onnx_file import facts_of_onnx  # reports read manifests without torch

    facts = [facts_of_onnx(path) for path in sorted((directory / "reduced").glob("*.onnx"))]
    places = sorted({each.normalised for each in facts if each.normalised is not None})
    if not places:
        return {}
    port = next(each.inputs[0] for each in facts if each.normalised is not None)
    input_record = {"dtype": port.dtype, "shape": list(port.shape), "normalised": ", ".join(places)}
    return {"input": input_record | {"before": "preprocessing without mean and std"}}


def manifest_of_directory(directory: Path, made_by: Mapping[str, str], *, command: str) -> dict[str, Any]:
    """Digest, size and making command of every file below the directory, aside from the manifest itself and what says
    how long something took; how its dense model takes its images, what of that its graphs do, in one word by what the
    reduced one was polished, if it was, which tokens it merges, and its outputs by name, if any.

    `made_by` maps relative names to commands; a file that no command is known for is listed with an empty one.
    """
    files = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.name != NAME and not is_effort(path)
    )
    named = {path.relative_to(directory).as_posix(): path for path in files}
    reduced = load_model_config(directory / "reduced")
    polish = reduced.lineage.get("polish")
    return {
        "kind": MANIFEST_KIND,
        "version": 1,
        "command": command,
        "versions": versions(),
        "preprocessing": load_model_config(directory / "dense").input.preprocessing,
        **({} if polish is None else {"polish": polish}),
        **entries_of_model(reduced),
        **input_of_graphs(directory),
        "files": {name: entry_of(path, made_by.get(name, "")) for name, path in named.items()},
    }


def write_manifest(directory: Path, made_by: Mapping[str, str], *, command: str) -> None:
    """Write manifest.json of the directory."""
    write_json(directory / NAME, manifest_of_directory(directory, made_by, command=command))
