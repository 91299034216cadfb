"""A model repository that is signed as a whole: every model and version in it, under one name and version."""

from pathlib import Path

from corp_deploy.machine import versions
from corp_deploy.store.manifest import MANIFEST_KIND, entry_of
from export.triton.config import EXPECTED_NAME
from export.triton.lint import lint_repository
from export.triton.lint_artifact import ERROR
from ground.errors import BadInput
from ground.files import write_json

from .names import MANIFEST, SIGNATURE
from .signature import entries_below
from .signer import Signer, sign


def unsign_repository(repository: Path) -> bool:
    """Remove a signature and its manifest, which hold no longer; whether there was one."""
    there = (repository / SIGNATURE).is_file()
    for name in (SIGNATURE, MANIFEST) if there else ():
        (repository / name).unlink(missing_ok=True)
    return there


def sign_repository(repository: Path, name: str, version: str, signer: Signer) -> None:
    """Write manifest.json, which says what the repository is called and what is in it, and model.sig over all.

    Raises BadInput where `package lint` finds an error: what somebody else laid there is not vouched for.
    """
    errors = [each for each in lint_repository(repository) if each.severity == ERROR]
    if errors:
        raise BadInput(f"{repository}: not signed: {errors[0]}; `package lint` tells of all")
    files = {
        path.relative_to(repository).as_posix(): entry_of(path)
        for path in entries_below(repository)
        if path.parent != repository or path.name == EXPECTED_NAME
    }
    head = {"kind": MANIFEST_KIND, "version": 1, "release": {"name": name, "version": version}}
    write_json(repository / MANIFEST, {**head, "versions": versions(), "files": files})
    sign(repository, signer, frozenset((*files, MANIFEST)))
