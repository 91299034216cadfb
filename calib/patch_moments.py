"""Second-order statistics of a convolution's input: of patches for least squares, of channels for GRAIL's Gram.

Shapes: G groups, C channels of a group, R of them chosen, T places of the kernel, U = C T (or R T) columns of a patch
in the order of the weights (see patches_of_map), O outputs, P = O / G outputs of a group.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ground.errors import BadInput

from .axes import refuse_impossible
from .sites import SiteKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchMoments:
    """Sums of patches u and outputs y over `tokens` output pixels, and of the input map x over `map_tokens` pixels.

    `taps` is T, `active_GC` counts |x| > eps. With `channels_GR` patches have these channels only, and cross_GPU, the
    sum of y u^T, replaces the sums over the other channels.
    """

    kind: ClassVar[SiteKind] = "convolution"
    system_width: ClassVar[int | None] = None
    taps: int
    tokens: float
    eps: float
    sum_GU: Tensor
    gram_GUU: Tensor
    map_tokens: float
    map_sum_GC: Tensor
    map_gram_GCC: Tensor
    active_GC: Tensor
    target_sum_O: Tensor
    target_square_O: Tensor
    channels_GR: Tensor | None = None
    cross_GPU: Tensor | None = None

    def __post_init__(self) -> None:
        (groups, width), outputs = self.map_sum_GC.shape[-2:], self.target_sum_O.shape[-1]
        chosen = width if self.channels_GR is None else self.channels_GR.shape[-1]
        if self.channels_GR is not None and (
            self.channels_GR.dtype != torch.int64 or self.channels_GR.shape != (groups, chosen)
        ):
            received = f"{self.channels_GR.dtype} {list(self.channels_GR.shape)}"
            raise BadInput(f"PatchMoments.channels_GR: got {received}, expected int64 of {groups} groups")
        if (self.cross_GPU is None) != (self.channels_GR is None):
            raise BadInput("PatchMoments.cross_GPU: expected with channels_GR, and only with it")
        sizes = {"G": groups, "C": width, "U": chosen * self.taps, "O": outputs, "P": outputs // groups}
        refuse_impossible(self, sizes)

    @property
    def entering(self) -> tuple[Tensor, Tensor]:
        return self.map_mean_GC.flatten(), torch.block_diag(*self.map_covariance_GCC)

    @property
    def mean_GU(self) -> Tensor:
        return self.sum_GU / self.tokens

    @property
    def second_GUU(self) -> Tensor:
        return self.gram_GUU / self.tokens

    @property
    def map_mean_GC(self) -> Tensor:
        return self.map_sum_GC / self.map_tokens

    @property
    def map_second_GCC(self) -> Tensor:
        return self.map_gram_GCC / self.map_tokens

    @property
    def map_covariance_GCC(self) -> Tensor:
        """Covariance E[x x^T] - E[x] E[x]^T over all pixels of the input map."""
        return self.map_second_GCC.baddbmm_(self.map_mean_GC[:, :, None], self.map_mean_GC[:, None], alpha=-1)

    @property
    def active_share_GC(self) -> Tensor:
        """Share of the input map's pixels where |x| > eps, by channel."""
        return self.active_GC / self.map_tokens

    @property
    def target_mean_O(self) -> Tensor:
        return self.target_sum_O / self.tokens
