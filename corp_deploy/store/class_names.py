"""The names of a classifier's classes in configurations of transformers and timm. Imports no torch."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ground.text import printable

CLASS_NAMES = "class_names"  # the entry of a lineage that has a name for each class, in the order of the logits
_UNNAMED = re.compile(r"LABEL_\d+")


def _written(config: Mapping[str, Any]) -> list[Any]:
    """Return the values of transformers' id2label, else timm's label_names or its older labels; empty without any."""
    by_index = config.get("id2label")
    if isinstance(by_index, Mapping):
        indices = [str(index) for index in range(len(by_index))]
        return [by_index[index] for index in indices] if set(indices) == set(by_index) else []
    inner = config.get("pretrained_cfg")
    places = (config, inner if isinstance(inner, Mapping) else {})
    lists = [place.get(key) for key in ("label_names", "labels") for place in places]
    return next((names for names in lists if isinstance(names, list)), [])


def class_names_in(config: Mapping[str, Any], classes: int | None) -> list[str]:
    """Return one printable name for each of the model's `classes`; a name that repeats gets its index.

    The list is empty where the configuration names no classes, another number of them, or all of them LABEL_n.
    """
    written = _written(config)
    if len(written) != classes or not all(isinstance(name, str) and name.strip() for name in written):
        return []
    names = [printable(" ".join(name.split())) for name in written]
    if all(map(_UNNAMED.fullmatch, names)):
        return []
    counts = Counter(names)
    distinct = [f"{name} ({index})" if counts[name] > 1 else name for index, name in enumerate(names)]
    return distinct if len(set(distinct)) == len(distinct) else []


def class_names_of_lineage(lineage: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names in a model's lineage; none where it has no list of texts."""
    names = lineage.get(CLASS_NAMES)
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list and names else ()
