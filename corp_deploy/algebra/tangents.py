"""How the outputs of an MLP and of an attention change with their first linear map. PURE; see gauss_newton.

Legend: B inputs, N tokens, X tokens of all inputs, H heads, Q query and key dimensions of a head, V value dimensions,
D inputs and a one, R rows of the first map, K inputs of the last map, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def with_one(x: Tensor) -> Tensor:
    """The inputs and a one, which carries the bias: [...,C] -> [...,D]."""
    return torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTangent:
    """Of y = last act(first u): `slope_XR` is act' at first u."""

    entering_XD: Tensor
    slope_XR: Tensor
    last_OR: Tensor

    def along(self, step_RD: Tensor) -> Tensor:
        return (self.slope_XR * (self.entering_XD @ step_RD.mT)) @ self.last_OR.mT

    def sensitivity(self, out_XO: Tensor) -> Tensor:
        return self.slope_XR * (out_XO @ self.last_OR)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTangent:
    """Of y = f(first u), f any function of what the first map gives [X,R], which is differentiated once: `pulled_XR` is
    linear in `weights_XO`, so that its own derivative is f's. `held_bytes`: of all that is kept for that.
    """

    entering_XD: Tensor
    given_XR: Tensor
    out_XO: Tensor
    weights_XO: Tensor
    pulled_XR: Tensor
    held_bytes: int

    @classmethod
    def of(cls, entering_XD: Tensor, given_XR: Tensor, run: Callable[[Tensor], Tensor]) -> Self:
        """Outputs may be of as many tokens as they will."""
        held = list[int]()

        def kept(tensor: Tensor) -> Tensor:
            held.append(tensor.nbytes)
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(kept, lambda tensor: tensor):
            given_XR = given_XR.detach().requires_grad_()
            out_XO = run(given_XR)
            weights_XO = torch.zeros_like(out_XO).requires_grad_()
            (pulled_XR,) = torch.autograd.grad(out_XO, given_XR, weights_XO, create_graph=True)
        return cls(
            entering_XD=entering_XD,
            given_XR=given_XR,
            out_XO=out_XO,
            weights_XO=weights_XO,
            pulled_XR=pulled_XR,
            held_bytes=sum(held),
        )

    def along(self, step_RD: Tensor) -> Tensor:
        moved_XR = self.entering_XD @ step_RD.mT
        (moved_XO,) = torch.autograd.grad(self.pulled_XR, self.weights_XO, moved_XR, retain_graph=True)
        return moved_XO

    def sensitivity(self, out_XO: Tensor) -> Tensor:
        (given_XR,) = torch.autograd.grad(self.out_XO, self.given_XR, out_XO, retain_graph=True)
        return given_XR


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTangent:
    """Of y = last [softmax(scale q k' + bias) v of all heads]; the first map gives rows q, then k, then v.

    `chance_BHNN` is the softmax. Where `values_only`, queries and keys don't change.
    """

    entering_BND: Tensor
    q_BHNQ: Tensor
    k_BHNQ: Tensor
    v_BHNV: Tensor
    chance_BHNN: Tensor
    last_OK: Tensor
    scale: float
    values_only: bool = False

    @property
    def entering_XD(self) -> Tensor:
        return self.entering_BND.flatten(0, 1)

    @property
    def _rows(self) -> int:
        """Of queries and keys together."""
        return 2 * self.q_BHNQ.shape[1] * self.q_BHNQ.shape[3]

    def _heads(self, rows_BNR: Tensor) -> Tensor:
        out_BHNX: Tensor = rows_BNR.unflatten(-1, (self.q_BHNQ.shape[1], -1)).transpose(1, 2)
        return out_BHNX

    def _through_softmax(self, scores_BHNN: Tensor) -> Tensor:
        """The softmax' derivative, its own transpose."""
        moved_BHNN = self.chance_BHNN * scores_BHNN
        return moved_BHNN - self.chance_BHNN * moved_BHNN.sum(dim=-1, keepdim=True)

    def along(self, step_RD: Tensor) -> Tensor:
        z_BHNV = self.chance_BHNN @ self._heads(self.entering_BND @ step_RD[self._rows :].mT)
        if not self.values_only:
            q_rows, k_rows = step_RD[: self._rows].chunk(2)
            q_BHNQ, k_BHNQ = (self._heads(self.entering_BND @ rows.mT) for rows in (q_rows, k_rows))
            scores_BHNN = self.scale * (q_BHNQ @ self.k_BHNQ.mT + self.q_BHNQ @ k_BHNQ.mT)
            z_BHNV = z_BHNV + self._through_softmax(scores_BHNN) @ self.v_BHNV
        return z_BHNV.transpose(1, 2).flatten(2).flatten(0, 1) @ self.last_OK.mT

    def sensitivity(self, out_XO: Tensor) -> Tensor:
        z_BHNV = self._heads((out_XO @ self.last_OK).unflatten(0, (len(self.chance_BHNN), -1)))
        v_BHNV = self.chance_BHNN.mT @ z_BHNV
        if self.values_only:
            q_BHNQ = k_BHNQ = torch.zeros_like(self.k_BHNQ)  # of what enters, however few queries are left of it
        else:
            scores_BHNN = self.scale * self._through_softmax(z_BHNV @ self.v_BHNV.mT)
            q_BHNQ, k_BHNQ = scores_BHNN @ self.k_BHNQ, scores_BHNN.mT @ self.q_BHNQ
        rows = (part.transpose(1, 2).flatten(2) for part in (q_BHNQ, k_BHNQ, v_BHNV))
        return torch.cat(tuple(rows), dim=-1).flatten(0, 1)
