"""What goes into a model and what comes out of it: named tensors with the batch in front.

A model with several inputs is called with them in the order of their ports, and gives its outputs in that order; one
output is given bare.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["logits", "token logits", "embedding", "feature map", "score map"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One named input. `shape` stands behind the batch, -1 for a size that is free; `dtype` by numpy's name: float32,
    uint8, int64, bool.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPort:
    """One named output and what it is for: logits [B,classes], token logits [B,N,classes], an embedding [B,C] that is
    compared by angle, a feature map [B,...], or a score map: scores of each place [B,H,W], or of each class there
    [B,K,H,W].
    """

    name: str
    role: Role


# What names an output begins with that is there only to keep a builder from fusing across it: nobody asks for it.
FUSION_BREAK = "fusion_break."


def is_fusion_break(name: str) -> bool:
    """Whether an output of this name is no answer of the model."""
    return name.startswith(FUSION_BREAK)


def image_port(shape: tuple[int, int, int]) -> Port:
    """Images as every vision model here takes them: channels, height, width."""
    return Port(name="images", shape=shape)


LOGITS = OutputPort(name="logits", role="logits")
