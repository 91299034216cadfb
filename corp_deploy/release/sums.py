"""SHA256SUMS of a release: every file that ships and its digest, as sha256sum writes them."""

from pathlib import Path

from ground.errors import BadInput
from ground.files import escapes_directory, text_from_file

from .names import ATTESTATION, SCRIPT, SUMS
from .signature import entries_below

MOST_BYTES = 2**26
UNLISTED = (SUMS, ATTESTATION, SCRIPT)
"""What lies in a release beyond its list: the list, what is signed over it, and the rest for another machine."""


def sums_from_file(path: Path) -> dict[str, str]:
    """Digests by name. Raises BadInput for no such list, and for a name that leads out of the release."""
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


def added_to(folder: Path, sums: dict[str, str]) -> list[str]:
    """What lies in a release and is in no list of it."""
    names = (path.relative_to(folder).as_posix() for path in entries_below(folder))
    return [name for name in names if name not in sums and name not in UNLISTED]
