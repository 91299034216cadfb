"""Whether a release is what it was when it was made: signature, digests, manifest, and the samples replayed. Imports no
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corp_deploy.store.manifest import load_manifest
from ground.errors import BadInput
from ground.files import path_inside, sha256_of_file

from .names import MANIFEST, PROVENANCE, SUMS
from .samples import replay
from .signature import Signed, Unverified, added_to, sums_from_file
from .verifier import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How many files were compared, what differs, whether samples were replayed; its name, and who signed it."""

    files: int
    graphs_replayed: bool
    differs: tuple[str, ...]
    name: str | None = None
    version: str | None = None
    signed_by: str | None = None


def _called(folder: Path) -> dict[str, Any]:
    release = load_manifest(folder).release
    return {} if release is None else msgspec.structs.asdict(release)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Whose signature is asked for, and of which release; None where any is taken."""

    verifier: Verifier
    name: str | None = None
    version: str | None = None

    def signed(self, folder: Path) -> Signed:
        """Before anything else of the release is read. Raises Unverified also for a release of another name or
        version: a signature of an older one holds for ever.
        """
        signed = self.verifier.verify(folder)
        if MANIFEST not in signed.files:
            raise Unverified(f"{MANIFEST}: missing, so that the signature is of no release")
        called = _called(folder)
        for what, expected in (("name", self.name), ("version", self.version)):
            actual = called.get(what)
            if expected is not None and expected != actual:
                raise Unverified(f"{MANIFEST}: the signed {what} is {actual!r:.100}, expected {expected!r:.100}")
        return signed


def _changed(folder: Path, digests: Mapping[str, str]) -> dict[str, str]:
    changed = {}
    for name, digest in digests.items():
        try:
            path = path_inside(folder, name, where=SUMS)
        except BadInput:
            changed[name] = f"{name}: a link, expected the file itself"
            continue
        if not path.is_file():
            changed[name] = f"{name}: missing"
        elif (now := sha256_of_file(path)) != digest:
            changed[name] = f"{name}: sha256 {now[:16]}..., {SUMS} says {digest[:16]}..."
    return changed


def _manifest_differs(folder: Path, sums: Mapping[str, str]) -> list[str]:
    """Where manifest.json and SHA256SUMS contradict one another, so that neither can be edited alone."""
    entries = {name: entry.sha256 for name, entry in load_manifest(folder).files.items()}
    listed = {name: digest for name, digest in sums.items() if name not in (MANIFEST, PROVENANCE)}
    names = sorted({*entries, *listed})
    return [f"{name}: {MANIFEST} and {SUMS} differ" for name in names if entries.get(name) != listed.get(name)]


def check(folder: Path, expected: Expected | None = None) -> Checked:
    """Verify the signature where one is expected, compare every digest, then replay the samples of the graphs that are
    whole. Nothing is read of a release whose signature doesn't hold. A model repository has a signature alone.

    Raises BadInput for a directory that is no release, Missing without ONNX Runtime, or the library that verifies.
    """
    try:
        signed = None if expected is None else expected.signed(folder)
    except Unverified as unverified:
        return Checked(files=0, graphs_replayed=False, differs=unverified.differs)
    called: dict[str, Any] = {} if signed is None else {"signed_by": signed.by}
    if signed is not None and SUMS not in signed.files:  # a model repository: the signature is its list
        return Checked(files=len(signed.files), graphs_replayed=False, differs=(), **called, **_called(folder))
    sums = sums_from_file(folder / SUMS)
    changed = _changed(folder, sums)
    differs = [*changed.values(), *(f"{name}: in no list of this release" for name in added_to(folder, sums))]
    if MANIFEST in sums and MANIFEST not in changed:
        differs += _manifest_differs(folder, sums)
        called |= _called(folder)
    differs += [] if changed else replay(folder)
    return Checked(files=len(sums), graphs_replayed=not changed, differs=tuple(differs), **called)
