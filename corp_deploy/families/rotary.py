"""Rotary position embeddings (RoFormer, arXiv 2104.09864): planes of a head turned by the position of each token.

Plane p of P is the dimensions p and p + P of a head, whichever way a library orders them. Tokens without a position
(class token, registers) are turned by nothing, their angles are 0.

Legend: B images, H heads or 1 for all, N tokens, P planes, K kept of them.
"""

import torch
from torch import Tensor, nn


def turned(x_BHND: Tensor, sin_HNP: Tensor, cos_HNP: Tensor) -> Tensor:
    """Every plane turned by its token's angle: [B,H,N,2P]."""
    one, other = x_BHND.chunk(2, dim=-1)
    return torch.cat((one * cos_HNP - other * sin_HNP, other * cos_HNP + one * sin_HNP), dim=-1)


def _of_planes(values_HXP: Tensor, planes_HK: Tensor) -> Tensor:
    """[H,X,P] -> [H,X,K], of each head its own planes."""
    heads, between = len(planes_HK), values_HXP.shape[1]
    return values_HXP.expand(heads, -1, -1).gather(2, planes_HK.unsqueeze(1).expand(-1, between, -1))


class Rotary(nn.Module):
    """Turns queries and keys by sines and cosines [H,N,P] of one image size, the same for all heads or each its own."""

    sin_HNP: Tensor
    cos_HNP: Tensor

    def __init__(self, sin_HNP: Tensor, cos_HNP: Tensor) -> None:
        super().__init__()
        assert sin_HNP.shape == cos_HNP.shape, (sin_HNP.shape, cos_HNP.shape)
        self.register_buffer("sin_HNP", sin_HNP)
        self.register_buffer("cos_HNP", cos_HNP)

    @property
    def planes(self) -> int:
        return self.sin_HNP.shape[-1]

    def tables(self) -> tuple[Tensor, Tensor]:
        """Sines and cosines [H,N,P]."""
        return self.sin_HNP, self.cos_HNP

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        sin_HNP, cos_HNP = self.tables()
        if q.shape[2] != sin_HNP.shape[1]:
            raise ValueError(
                f"got {q.shape[2]} tokens, positions are of {sin_HNP.shape[1]}: the image size is that of the model as "
                "it was built (img_size)"
            )
        return turned(q, sin_HNP, cos_HNP), turned(k, sin_HNP, cos_HNP)

    def narrowed(self, planes_HK: Tensor) -> "Rotary":
        """The same for heads of these planes alone."""
        return Rotary(_of_planes(self.sin_HNP, planes_HK), _of_planes(self.cos_HNP, planes_HK))

    def of_heads(self, kept_H: Tensor) -> "Rotary":
        """The same for these heads alone."""
        if len(self.sin_HNP) == 1:
            return Rotary(self.sin_HNP, self.cos_HNP)
        return Rotary(self.sin_HNP[kept_H], self.cos_HNP[kept_H])

    def plain(self) -> "Rotary":
        """The same with nothing left to compute, to be exported."""
        sin_HNP, cos_HNP = self.tables()
        return Rotary(sin_HNP.detach().clone(), cos_HNP.detach().clone())


class LearnedRotary(Rotary):
    """Angles of learned frequencies along both axes of the image (arXiv 2403.13298, section 3.2), a pair [2,H,P] a head
    and plane; `places_2N` are the tokens' coordinates.
    """

    places_2N: Tensor

    def __init__(self, freqs_2HP: Tensor, places_2N: Tensor) -> None:
        nn.Module.__init__(self)
        self.freqs_2HP = nn.Parameter(freqs_2HP)
        self.register_buffer("places_2N", places_2N)

    @property
    def planes(self) -> int:
        return self.freqs_2HP.shape[-1]

    def tables(self) -> tuple[Tensor, Tensor]:
        angles_2HNP = self.places_2N[:, None, :, None] * self.freqs_2HP[:, :, None, :]
        angles_HNP = angles_2HNP[0] + angles_2HNP[1]
        return angles_HNP.sin(), angles_HNP.cos()

    def narrowed(self, planes_HK: Tensor) -> Rotary:
        freqs_H2P = self.freqs_2HP.detach().transpose(0, 1)
        return LearnedRotary(_of_planes(freqs_H2P, planes_HK).transpose(0, 1).contiguous(), self.places_2N.clone())

    def of_heads(self, kept_H: Tensor) -> Rotary:
        return LearnedRotary(self.freqs_2HP.detach()[:, kept_H].contiguous(), self.places_2N.clone())
