"""How a closed loop fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .correct import STRENGTHS
from .read_tokens import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How a closed loop fits: the ridges it may choose among, which images choose, whether first layers are aligned,
    and which tokens behind the last block count (see tokens_to_fit).

    `half_ids`: content ids of the images in one of two halves that split no group (moments' own half); without them
    each `held_out_every`-th image chooses.
    """

    strengths: Sequence[float] = STRENGTHS
    held_out_every: int = 4
    align_inputs: bool = True
    reads: Reads | None = None
    half_ids: Tensor | None = None
