"""Named inputs and outputs of models, with the batch as first dimension.

A model is called with its inputs in the order of their ports and returns its outputs in that order, or a bare tensor if
it has one output.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["logits", "token logits", "embedding", "feature map", "score map"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One named input."""

    name: str
    shape: tuple[int, ...]
    """Sizes behind the batch, -1 for a free one."""
    dtype: str = "float32"
    """numpy's name: float32, uint8, int64 or bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPort:
    """One named output with its role.

    Roles are logits [B,classes], token logits [B,N,classes], an embedding [B,C], compared by angle, a feature map
    [B,...], and a score map, with a score for each place [B,H,W] or for each class and place [B,K,H,W].
    """

    name: str
    role: Role


# Prefix of outputs that exist only to keep an engine builder from fusing layers across them.
FUSION_BREAK = "fusion_break."


def is_fusion_break(name: str) -> bool:
    return name.startswith(FUSION_BREAK)


def image_port(shape: tuple[int, int, int]) -> Port:
    """Return the input port of a vision model for images [channels, height, width]."""
    return Port(name="images", shape=shape)


LOGITS = OutputPort(name="logits", role="logits")
