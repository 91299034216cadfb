"""Gauss-Newton steps for the weights of a layer's first linear map, by products alone. PURE.

J is the derivative of the layer's outputs by the weights W [R,D] of its first linear map, r the residual of the
outputs. The step is argmin mean_x ||r_x - J_x S||^2 + ridge ||S||^2, which has no step size. J'J has (R D)^2 entries
and is never built: conjugate gradients need J S and J' r only. They are preconditioned by K-FAC's Kronecker product
for J'J (Martens and Grosse 2015, arXiv 1503.05671, section 3), E[g g'] (x) E[u u'], with u the map's inputs and g the
derivative, by the map's outputs, of the layer's outputs summed with independent random signs.

Legend: X tokens, D inputs of the first map, a one for its bias among them, R its outputs, O outputs of the layer.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def with_one(x: Tensor) -> Tensor:
    """Append a one along the last axis, the input of the bias: [...,C] -> [...,C + 1]."""
    return torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTangent:
    """The derivative J of a layer's outputs, at some tokens, by the weights W of its first map.

    The layer is y = f(W u): u is `entering_XD`, with a last column of ones if the map has a bias, W u is `given_XR` and
    y is `out_XO`. `pulled_XR` is f's vector-Jacobian product with `weights_XO`. It is linear in them, so that its
    derivative is the Jacobian-vector product. `size_bytes`: bytes of the fields and of all that autograd saved.
    """

    entering_XD: Tensor
    given_XR: Tensor
    out_XO: Tensor
    weights_XO: Tensor
    pulled_XR: Tensor
    size_bytes: int

    @classmethod
    def of(cls, entering_XD: Tensor, given_XR: Tensor, run: Callable[[Tensor], Tensor]) -> Self:
        """Return the tangent of f, which `run` computes: the layer's outputs, also at fewer tokens, from the map's."""
        held_bytes = list[int]()

        def kept(tensor: Tensor) -> Tensor:
            held_bytes.append(tensor.nbytes)
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(kept, lambda tensor: tensor):
            given_XR = given_XR.detach().requires_grad_()
            out_XO = run(given_XR)
            weights_XO = torch.zeros_like(out_XO).requires_grad_()
            (pulled_XR,) = torch.autograd.grad(out_XO, given_XR, weights_XO, create_graph=True)
        own = (entering_XD, given_XR, out_XO, weights_XO, pulled_XR)
        return cls(
            entering_XD=entering_XD,
            given_XR=given_XR,
            out_XO=out_XO,
            weights_XO=weights_XO,
            pulled_XR=pulled_XR,
            size_bytes=sum(held_bytes) + sum(each.nbytes for each in own),
        )

    def along(self, step_RD: Tensor) -> Tensor:
        """Return J S [X,O]: the change of the outputs along a step of the weights."""
        moved_XR = self.entering_XD @ step_RD.mT
        (moved_XO,) = torch.autograd.grad(self.pulled_XR, self.weights_XO, moved_XR, retain_graph=True)
        return moved_XO

    def sensitivity(self, out_XO: Tensor) -> Tensor:
        """Return the derivative of the inner product <outputs, out_XO> by the map's outputs [X,R]."""
        (given_XR,) = torch.autograd.grad(self.out_XO, self.given_XR, out_XO, retain_graph=True)
        return given_XR


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """The tangent at some tokens, the residual r of their outputs, and each token's weight (None: all 1)."""

    tangent: LayerTangent
    residual_XO: Tensor
    weight_X: Tensor | None = None

    @property
    def weight(self) -> float:
        return float(len(self.residual_XO)) if self.weight_X is None else float(self.weight_X.double().sum())

    def back(self, out_XO: Tensor) -> Tensor:
        """Return J' w out_XO, with the tokens' weights w, summed over the tokens [R,D]."""
        weighted_XO = out_XO if self.weight_X is None else out_XO * self.weight_X.to(out_XO)[:, None]
        return self.tangent.sensitivity(weighted_XO).mT @ self.tangent.entering_XD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kronecker:
    """The matrix E[g g'] (x) E[u u'] + ridge I: the eigenvectors of both factors and the eigenvalues of the sum."""

    left_RR: Tensor
    right_DD: Tensor
    value_RD: Tensor

    def divided(self, step_RD: Tensor) -> Tensor:
        return self.left_RR @ ((self.left_RR.mT @ step_RD @ self.right_DD) / self.value_RD) @ self.right_DD.mT


def _second_moments(pieces: Iterable[Residuals], weight: float) -> tuple[Tensor, Tensor]:
    """Return E[g g'] over weighted tokens and E[u u'] over unweighted ones, float64; all calls draw the same signs."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    g_RR, u_DD, tokens = torch.zeros(()), torch.zeros(()), 0
    for piece in pieces:
        u_XD, r_XO = piece.tangent.entering_XD, piece.residual_XO
        sign_XO = torch.randint(0, 2, r_XO.shape, generator=generator, device="cpu").to(r_XO) * 2.0 - 1.0
        root_XO = sign_XO if piece.weight_X is None else sign_XO * piece.weight_X.to(r_XO).sqrt()[:, None]
        g_XR = piece.tangent.sensitivity(root_XO)
        g_RR, u_DD = (g_XR.mT @ g_XR).double() + g_RR.to(r_XO.device), (u_XD.mT @ u_XD).double() + u_DD.to(u_XD.device)
        tokens += len(u_XD)
    return g_RR / weight, u_DD / tokens


def _preconditioner(
    pieces: Iterable[Residuals], weight: float, ridge_rel: float, like: Tensor
) -> tuple[_Kronecker, float]:
    """Return the preconditioner and its ridge: ridge_rel * the mean diagonal of the Kronecker product."""
    g_RR, u_DD = _second_moments(pieces, weight)
    ridge = ridge_rel * float(g_RR.diagonal().mean() * u_DD.diagonal().mean())
    (g_R, left_RR), (u_D, right_DD) = torch.linalg.eigh(g_RR), torch.linalg.eigh(u_DD)
    value_RD = torch.outer(g_R.clamp_min(0.0), u_D.clamp_min(0.0))
    floor = max(ridge, float(torch.finfo(torch.float32).eps * value_RD.max()), torch.finfo(torch.float64).tiny)
    kronecker = _Kronecker(left_RR=left_RR.to(like), right_DD=right_DD.to(like), value_RD=(value_RD + floor).to(like))
    return kronecker, ridge


def gauss_newton(pieces: Iterable[Residuals], *, ridge_rel: float, iterations: int) -> Iterator[Tensor]:
    """Yield the step [R,D] after each of at most `iterations` iterations of conjugate gradients, until convergence.

    `pieces` is iterated twice, and once more in each iteration. `ridge_rel` is relative to the mean diagonal of
    K-FAC's Kronecker product for J'J; 0 is allowed.
    """
    assert ridge_rel >= 0.0, ridge_rel
    weight, left_RD = 0.0, torch.zeros(())
    for piece in pieces:
        gradient_RD = piece.back(piece.residual_XO)
        weight, left_RD = weight + piece.weight, gradient_RD + left_RD.to(gradient_RD)
    assert weight > 0.0, weight
    left_RD = left_RD / weight
    kronecker, ridge = _preconditioner(pieces, weight, ridge_rel, left_RD)
    step_RD, divided_RD = torch.zeros_like(left_RD), kronecker.divided(left_RD)
    towards_RD, gain = divided_RD, float((left_RD * divided_RD).double().sum())
    least = gain * torch.finfo(left_RD.dtype).eps  # below it only rounding is left, which dependent inputs amplify
    for _ in range(iterations):
        if not gain > least:
            return
        curved = (piece.back(piece.tangent.along(towards_RD)) for piece in pieces)
        curved_RD = reduce(torch.add, curved) / weight  # one by one, so that no more than two are held
        curved_RD = curved_RD + ridge * towards_RD
        bend = float((towards_RD * curved_RD).double().sum())
        if not bend > 0.0:
            return
        step_RD = step_RD + gain / bend * towards_RD
        left_RD = left_RD - gain / bend * curved_RD
        divided_RD = kronecker.divided(left_RD)
        before, gain = gain, float((left_RD * divided_RD).double().sum())
        towards_RD = divided_RD + gain / before * towards_RD
        yield step_RD
