"""How a dense model is built again: all that config.json says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .preprocessing import Preprocessing

OF_TORCHVISION = "torchvision:"
"""In front of the name of a model of torchvision's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family's model by name and keyword arguments, and what of its preprocessing is set."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    family: str = "timm"
