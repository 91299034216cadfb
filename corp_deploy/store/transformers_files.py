"""The files of a directory that save_pretrained of transformers has written.

Weights are read from safetensors, whole or in shards; what else may hold them holds pickled code as well.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ground.errors import BadInput

from .hub_snapshot import CONFIG, config_of_directory
from .weights import first_names

ORIGIN = "transformers"
"""Entry of a lineage's source: the configuration and what else is to be written again."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
C = TypeVar("C")


def config_of_transformers(directory: Path) -> dict[str, Any]:
    """Its config.json. Raises BadInput where there is none, or a damaged one."""
    return config_of_directory(directory, "expected a directory that save_pretrained of transformers has written")


def changes_of(kwargs: Mapping[str, Any], changes: type[C], takes: str) -> C:
    """What is said otherwise than the directory has it. Raises BadInput, saying what a kind of model `takes`."""
    try:
        return msgspec.convert(dict(kwargs), changes)
    except msgspec.ValidationError as error:
        raise BadInput(f"--model-kwargs: {str(error)[:200]}; {takes}") from None


def has_weights(directory: Path) -> bool:
    """Whether there are any, of a kind that is read or of another."""
    return any((directory / name).is_file() for name in _WEIGHTS) or any(directory.glob("pytorch_model*"))


def weights_of_transformers(directory: Path) -> Path:
    """Raises BadInput where there are none, or only such as hold pickled code."""
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return directory / name
    pickled = sorted(path.name for path in directory.glob("pytorch_model*"))
    if pickled:
        raise BadInput(
            f"{directory}: its weights are {first_names(pickled)}, which may hold code; save them as safetensors: "
            "model.save_pretrained(DIR, safe_serialization=True)"
        )
    raise BadInput(f"{directory}: no weights beside {CONFIG}, expected {' or '.join(_WEIGHTS)}")
