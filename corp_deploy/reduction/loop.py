"""The settings of a closed loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .correct import STRENGTHS
from .read_tokens import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The settings of a closed loop.

    `strengths`: the ridges to choose among; `align_inputs`: whether layers that write a site are fitted first; `reads`:
    the tokens behind the last block that count (see tokens_to_fit). `half_ids`: content ids of the images in one of two
    halves that split no group (moments' own half), which choose; without them every `held_out_every`-th image chooses.
    """

    strengths: Sequence[float] = STRENGTHS
    held_out_every: int = 4
    align_inputs: bool = True
    reads: Reads | None = None
    half_ids: Tensor | None = None
