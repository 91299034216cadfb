"""The two lists of a release's files with their digests: SHA256SUMS and the signature.

SHA256SUMS is in the format of sha256sum. The signature `model.sig`, in the format of OpenSSF model signing, is a
Sigstore bundle around an in-toto statement that lists every file with its digest. OpenSSF's library does the
cryptography and compares digests, but it skips the files that a statement excludes; so this module checks that the
statement excludes only the signature and the directory .stages.
"""

import base64
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ground.errors import BadInput, Missing
from ground.files import escapes_directory, regular_file, sha256_of_file, text_from_file

from .names import ATTESTATION, SCRIPT, SIGNATURE, SUMS

if TYPE_CHECKING:
    from model_signing import hashing, verifying

UNSIGNED = (".stages", SIGNATURE)
"""The entries that no signature covers: the state of the staged build, and the signature itself."""
MOST_BYTES = 2**26
UNLISTED = (SUMS, ATTESTATION, SCRIPT)
"""The files of a release that SHA256SUMS doesn't list: itself, its attestation, and the script of remaining stages."""


class Unverified(Exception):
    """The error of a signature that can't be verified; `differs` has a line for each reason."""

    def __init__(self, *differs: str) -> None:
        super().__init__("; ".join(differs))
        self.differs = differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A verified signature: its signer's name, and the sha256 of every signed file by the file's relative path."""

    by: str
    files: Mapping[str, str]


def require_library() -> None:
    """Raise Missing without the library that makes and verifies signatures."""
    try:
        import model_signing.signing
        import model_signing.verifying  # noqa: F401
    except ImportError:
        raise Missing("signatures need the package model-signing: pip install 'corp-deploy[sign]'") from None


def hashing_config() -> "hashing.Config":
    from model_signing import hashing

    config = hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return config.set_ignored_paths(paths=UNSIGNED, ignore_git_paths=False)


def entries_below(folder: Path, without: Sequence[str] = UNSIGNED) -> Iterator[Path]:
    """Yield the files and links below a directory, except the top entries `without`; links are not followed."""
    for path in sorted(each for each in folder.iterdir() if each.name not in without):
        if path.is_dir() and not path.is_symlink():
            yield from entries_below(path, ())
        else:
            yield path


def unsign(folder: Path) -> bool:
    """Remove a signature with its attestation; return True if there was a signature."""
    there = (folder / SIGNATURE).is_file()
    for name in (SIGNATURE, ATTESTATION):
        (folder / name).unlink(missing_ok=True)
    return there


def _listed(data: bytes) -> dict[str, str]:
    """Return the digests by name from a verified bundle; raise Unverified if it excludes files or isn't by sha256."""
    statement = json.loads(base64.b64decode(json.loads(data)["dsseEnvelope"]["payload"]))
    serial = statement["predicate"]["serialization"]
    ignored = {Path(each) for each in serial.get("ignore_paths", ())}
    if beyond := ignored - {Path(each) for each in UNSIGNED}:
        raise Unverified(
            f"{SIGNATURE}: excludes {str(min(beyond))[:150]!r}; a release's signature covers all its files"
        )
    if (serial["method"], serial["hash_type"]) != ("files", "sha256"):
        kind = f"{serial['method']!s:.20} by {serial['hash_type']!s:.20}"
        raise Unverified(f"{SIGNATURE}: of {kind}, expected files by sha256")
    return {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}


def _differences(folder: Path, listed: Mapping[str, str]) -> list[str]:
    there = {path.relative_to(folder).as_posix(): path for path in entries_below(folder)}
    differences = [f"{name}: not signed, it was added" for name in sorted(there.keys() - listed.keys())]
    differences += [f"{name}: missing, the signature lists it" for name in sorted(listed.keys() - there.keys())]
    for name in sorted(there.keys() & listed.keys()):
        if (digest := sha256_of_file(there[name])) != listed[name]:
            differences.append(f"{name}: sha256 {digest[:16]}..., the signature says {listed[name][:16]}...")
    return differences


def _bundle(folder: Path) -> bytes:
    path = folder / SIGNATURE
    try:
        if path.is_symlink() or regular_file(path).stat().st_size > MOST_BYTES:
            raise Unverified(f"{SIGNATURE}: a link, or larger than {MOST_BYTES} bytes: no signature")
        return path.read_bytes()
    except FileNotFoundError:
        raise Unverified(f"{SIGNATURE}: missing: this directory is not signed") from None


def _why(error: Exception) -> str:
    words = " ".join(str(error).split())
    if words.startswith("Key mismatch"):
        return "made with another key"
    if isinstance(error, KeyError | json.JSONDecodeError):
        return f"does not hold: cut off, or no Sigstore bundle ({words[:300]}); copy it again from the signer"
    return f"does not hold ({words[:300] or type(error).__name__})"


def verify_signature(folder: Path, verifier: "verifying.Config", who: Callable[[bytes], str]) -> Signed:
    """Return the signature of a directory if `verifier` accepts it and it covers every file, unchanged.

    No file but the signature is parsed. `who` returns the signer's name from the bytes of the bundle.

    Raises Unverified, and BadInput for a path that is not a directory.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such directory, expected a release or repository that was signed")
    data = _bundle(folder)
    odd = [path for path in entries_below(folder) if path.is_symlink() or not path.is_file()]
    if odd:
        raise Unverified(*(f"{path.relative_to(folder).as_posix()}: a link or device, not a file" for path in odd))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints a message about old bundles
            verifier.set_hashing_config(hashing_config()).verify(folder, folder / SIGNATURE)
    except OSError as error:
        raise BadInput(f"{folder}: can't be read ({error})") from None
    except Exception as error:  # whatever a hostile bundle does to the library, it is not verified
        if not str(error).startswith("Signature mismatch"):
            raise Unverified(f"{SIGNATURE}: {_why(error)}") from None
        raise Unverified(*_differences(folder, _listed(data)) or [f"{SIGNATURE}: {_why(error)}"]) from None
    listed = _listed(data)
    return Signed(by=who(data), files=listed)


def sums_from_file(path: Path) -> dict[str, str]:
    """Read a SHA256SUMS as digests by name; raise BadInput for a damaged list and for names outside the release."""
    try:
        lines = text_from_file(path, most_bytes=MOST_BYTES).splitlines()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected a release directory written by corp-deploy release") from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}
    if not sums or len(sums) != len(lines):
        raise BadInput(f"{path}: not a list of digests and names; the file is damaged")
    outside = [name for name in sums if escapes_directory(name)]
    if outside:
        raise BadInput(f"{path}: {outside[0]!r} lies outside the release")
    return sums


def unlisted_files(folder: Path, sums: dict[str, str]) -> list[str]:
    """Return the names of a release's files that are neither in SHA256SUMS (`sums`) nor in UNLISTED."""
    names = (path.relative_to(folder).as_posix() for path in entries_below(folder))
    return [name for name in names if name not in sums and name not in UNLISTED]
