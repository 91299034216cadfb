"""The settings of a closed loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .correct import STRENGTHS
from .read_tokens import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The settings of a closed loop.

    `strengths`: the ridges to choose among; `align_inputs`: whether layers that write a site are fitted before it is
    reduced; `reads`: the tokens behind the last block that count (see counts_all). Ridges are chosen on held-out
    images. These are every `held_out_every`-th one or, with `half_ids`, the images with these content ids: one half of
    the images that splits no group, and fits to either half are then judged on the other.
    """

    strengths: Sequence[float] = STRENGTHS
    held_out_every: int = 4
    align_inputs: bool = True
    reads: Reads | None = None
    half_ids: Tensor | None = None
