"""Whether a release is what it was when it was made: digests, manifest, and the samples replayed. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from corp_deploy.store.manifest import load_manifest
from ground.errors import BadInput
from ground.files import below, leaves, sha256_of_file, text_from_file

from .names import MANIFEST, SUMS
from .samples import replay

MOST_SUMS_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How many files were compared, what differs, and whether the samples were replayed."""

    files: int
    graphs_replayed: bool
    differs: tuple[str, ...]


def _sums(path: Path) -> dict[str, str]:
    try:
        lines = text_from_file(path, most_bytes=MOST_SUMS_BYTES).splitlines()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected a release directory written by corp-deploy release") from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}
    if not sums or len(sums) != len(lines):
        raise BadInput(f"{path}: not a list of digests and names; the file is damaged")
    outside = [name for name in sums if leaves(name)]
    if outside:
        raise BadInput(f"{path}: {outside[0]!r} lies outside the release")
    return sums


def _goes_through_a_link(folder: Path, name: str) -> bool:
    """Whether a file of a release is read where it doesn't lie."""
    try:
        below(folder, name, where=SUMS)
    except BadInput:
        return True
    return False


def _changed(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """What differs, by name."""
    changed = {}
    for name, digest in known.items():
        if _goes_through_a_link(folder, name):
            changed[name] = f"{name}: a link, expected the file itself"
        elif not (folder / name).is_file():
            changed[name] = f"{name}: missing"
        elif (now := sha256_of_file(folder / name)) != digest:
            changed[name] = f"{name}: sha256 {now[:16]}..., {SUMS} says {digest[:16]}..."
    return changed


def _manifest_differs(folder: Path, sums: Mapping[str, str]) -> list[str]:
    """Where manifest.json and SHA256SUMS contradict one another, so that neither can be edited alone."""
    entries = {name: entry.sha256 for name, entry in load_manifest(folder).files.items()}
    listed = {name: digest for name, digest in sums.items() if name != MANIFEST}
    names = sorted({*entries, *listed})
    return [f"{name}: {MANIFEST} and {SUMS} differ" for name in names if entries.get(name) != listed.get(name)]


def check(folder: Path) -> Checked:
    """Compare every digest, then replay the samples of the graphs that are whole.

    Raises BadInput for a directory that is no release, Missing without ONNX Runtime.
    """
    sums = _sums(folder / SUMS)
    changed = _changed(folder, sums)
    differs = list(changed.values())
    if MANIFEST in sums and MANIFEST not in changed:
        differs += _manifest_differs(folder, sums)
    if not changed:
        differs += replay(folder)
    return Checked(files=len(sums), graphs_replayed=not changed, differs=tuple(differs))
