"""How a release came to be, as an in-toto Statement v1 with a SLSA v1 provenance predicate.

Sources: in-toto.io/Statement/v1, slsa.dev/provenance/v1. When it was built is left out, as of everything that is
digested: the same inputs give the same statement, whose invocation is called by the digest of these inputs.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corp_deploy import __version__
from corp_deploy.machine import versions
from ground.files import sha256_of_file, sha256_of_text, text_from_file

from .digests import read_stamp
from .incremental import STATE, Stage
from .names import GATE, PARITY, RECIPE
from .recipe import Recipe

STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:corp-deploy:release:1"
_OF_FOLDER = "a folder or shards: sha256 over the lines 'sha256 name' of all its files, sorted"


def _read_outside(root: Path, stages: Sequence[Stage]) -> dict[str, tuple[Path, str]]:
    """What stages had read beyond the release, by label: the path, and the digest that it had then."""
    read: dict[str, tuple[Path, str]] = {}
    for stage in stages:
        stamp = read_stamp(root / STATE, stage.name)
        for label, path in stage.outside.items():
            if stamp is not None and label in stamp.inputs:
                read.setdefault(label, (path, stamp.inputs[label]))
    return read


def _named(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}


def _definition(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, Any]:
    outside = sorted(_read_outside(root, stages).items())
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "release": {"name": recipe.name, "version": recipe.release.version},
            "recipe": tomllib.loads(text_from_file(root / RECIPE)),
        },
        "internalParameters": {"commands": [stage.command for stage in stages]},
        "resolvedDependencies": [
            _named(label, digest) | ({} if path.is_file() else {"annotations": {"digest": _OF_FOLDER}})
            for label, (path, digest) in outside
        ],
    }


def provenance(root: Path, recipe: Recipe, stages: Sequence[Stage], digests: Mapping[str, str]) -> dict[str, Any]:
    """The statement over the files of a release, `digests` by name."""
    definition = _definition(root, recipe, stages)
    measured = sorted({*(path.name for path in root.glob("bench*.json")), PARITY, GATE})
    details = {
        "builder": {"id": f"pkg:generic/corp-deploy@{__version__}", "version": versions()},
        "metadata": {"invocationId": sha256_of_text(json.dumps(definition, sort_keys=True))},
        "byproducts": [_named(name, sha256_of_file(root / name)) for name in measured],
    }
    return {
        "_type": STATEMENT,
        "subject": [_named(name, digest) for name, digest in sorted(digests.items())],
        "predicateType": PREDICATE,
        "predicate": {"buildDefinition": definition, "runDetails": details},
    }
