"""Groups of models that the same arguments make small."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Names of one family and the arguments that make them small."""

    family: str
    names: tuple[str, ...]
    kwargs: Mapping[str, Any]
    head_dim: int | None = HEAD_DIM
