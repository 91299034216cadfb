"""Where a model's preprocessing and weights come from, for people and machines."""

from typing import Any

from corp_deploy.families import traced_model
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.hub_snapshot import ORIGIN


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """Without the configuration that it was read from."""
    source = dict(checkpoint.lineage.get("source", {}))
    source.pop(ORIGIN, None)
    return source


def preprocessing_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """The preprocessing with its source, and which weights were taken, as JSON values."""
    origin = _origin(checkpoint)
    return {
        "preprocessing": traced_model.input_spec(checkpoint.model).as_json(),
        "preprocessing_source": origin.pop("preprocessing", "the model's directory"),
        "weights": origin,
    }


def preprocessing_line(checkpoint: Checkpoint) -> str:
    """The preprocessing in one line."""
    source = _origin(checkpoint).get("preprocessing", "the model's directory")
    return f"preprocessing: {traced_model.input_spec(checkpoint.model).as_line()}; from {source}"
