"""Releases of a history, each read with the files beside its bench record: proof, recipe and versions."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from corp_deploy.store.manifest import load_manifest
from ground.errors import BadInput
from ground.files import text_from_file
from perf.parity.parity import load_parity
from perf.report.content import flat_texts
from perf.report.past_figures import PastRelease
from perf.report.past_releases import PastReleases, build_past_releases
from perf.stats.releases import BENCH, MANIFEST, PARITY, RECIPE, Release, load_history

T = TypeVar("T")


def read_past_releases(directory: Path) -> PastReleases:
    """Read a directory of releases; raise BadInput if it has none. Files beside records may be missing or damaged."""
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory, expected one in which `gate --history` keeps bench records")
    return build_past_releases(load_history(directory), _read_release, where=str(directory))


def _read_release(release: Release) -> PastRelease:
    missing = dict[str, str]()

    def read(kind: str, load: Callable[[Path], T]) -> T | None:
        path = release.beside(kind)
        if path is None:
            missing[kind] = f"no {kind} is kept with its record"
            return None
        try:
            return load(path)
        except BadInput as error:
            missing[kind] = str(error).replace(str(path), path.name)
            return None

    parity, recipe, manifest = read(PARITY, load_parity), read(RECIPE, _load_recipe), read(MANIFEST, load_manifest)
    named, recipe = manifest.release if manifest else None, recipe or {}
    version = recipe.pop("release.version", named.version if named else None)
    folder = release.path.parent.name if release.path is not None and release.path.name == BENCH else None
    return PastRelease(
        release=release,
        label=version or folder or release.name,
        model=recipe.get("release.name", named.name if named else None),
        parity=parity,
        recipe=recipe,
        versions=flat_texts(manifest.versions) if manifest else {},
        missing=missing,
    )


def _load_recipe(path: Path) -> dict[str, Any]:
    try:
        return flat_texts(tomllib.loads(text_from_file(path)))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: no TOML: {error}") from None
