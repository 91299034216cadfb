"""Gauss-Newton steps against damped least squares on torch's Jacobian, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from corp_deploy.algebra.gauss_newton import LayerTangent, Residuals, gauss_newton, with_one

INPUTS, HIDDEN, OUTPUTS = 3, 4, 3


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_dependence(x: Tensor, kind: str) -> Tensor:
    """Make the last input depend on the first, nearly if ill-conditioned and exactly if singular."""
    if kind == "ill-conditioned":
        return torch.cat((x[..., :-1], x[..., :1] + 1e-4 * x[..., -1:]), dim=-1)
    return torch.cat((x[..., :-1], x[..., :1]), dim=-1) if kind == "singular" else x


def mlp_tangent(kind: str, tokens: slice = slice(None)) -> tuple[LayerTangent, Callable[[Tensor], Tensor], Tensor]:
    entering_XD = with_one(with_dependence(normal(40, INPUTS, seed=0), kind))[tokens]
    first_RD, last_OR = normal(HIDDEN, INPUTS + 1, seed=1), normal(OUTPUTS, HIDDEN, seed=2)
    tangent = LayerTangent.of(entering_XD, entering_XD @ first_RD.mT, lambda z_XR: F.gelu(z_XR) @ last_OR.mT)
    return tangent, lambda first: F.gelu(entering_XD @ first.mT) @ last_OR.mT, first_RD


@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "singular"])
@pytest.mark.parametrize("ridge_rel", [1e-3, 1.0])
def test_step_is_the_damped_least_squares_of_the_jacobian(kind: str, ridge_rel: float) -> None:
    """Tokens have different weights, some of them 0."""
    tangent, outputs, first_RD = mlp_tangent(kind)
    residual_XO = normal(len(tangent.entering_XD), OUTPUTS, seed=9)
    weight_X = torch.arange(len(residual_XO)).double() % 4
    pieces = [Residuals(tangent=tangent, residual_XO=residual_XO, weight_X=weight_X)]
    step_RD = list(gauss_newton(pieces, ridge_rel=ridge_rel, iterations=400))[-1]
    jacobian_YP = torch.autograd.functional.jacobian(outputs, first_RD).view(-1, first_RD.numel())
    root_Y = weight_X.repeat_interleave(OUTPUTS).sqrt() / weight_X.sum().sqrt()
    ridge = ridge_rel * ridge_scale(tangent, weight_X)
    rows = torch.cat((jacobian_YP * root_Y[:, None], ridge**0.5 * torch.eye(first_RD.numel(), dtype=torch.float64)))
    target = torch.cat((residual_XO.flatten() * root_Y, torch.zeros(first_RD.numel(), dtype=torch.float64)))
    expected = torch.linalg.lstsq(rows, target[:, None], driver="gelsd").solution
    torch.testing.assert_close(step_RD.flatten(), expected[:, 0], rtol=1e-4, atol=1e-5)


def ridge_scale(tangent: LayerTangent, weight_X: Tensor) -> float:
    """Return the mean diagonal of K-FAC's product, to which the ridge is relative, by sums over tokens."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (len(weight_X), OUTPUTS), generator=generator).double() * 2 - 1
    g_XR = tangent.sensitivity(sign * weight_X.sqrt()[:, None])
    u_XD = tangent.entering_XD
    g_R = sum(g.square() for g in g_XR) / weight_X.sum()
    u_D = sum(u.square() for u in u_XD) / len(u_XD)
    return float(torch.as_tensor(g_R).mean() * torch.as_tensor(u_D).mean())


def test_pieces_add_up_and_a_planted_step_is_recovered() -> None:
    tangent, _, first_RD = mlp_tangent("random")
    planted_RD = normal(*first_RD.shape, seed=11)
    residual_XO = tangent.along(planted_RD)

    def piece(tokens: slice) -> Residuals:
        return Residuals(tangent=mlp_tangent("random", tokens)[0], residual_XO=residual_XO[tokens])

    pieces = [piece(slice(0, 13)), piece(slice(13, None))]
    *_, step_RD = gauss_newton(pieces, ridge_rel=0.0, iterations=200)
    torch.testing.assert_close(step_RD, planted_RD, rtol=1e-6, atol=1e-6)


def test_zero_residual_gives_no_step() -> None:
    tangent, _, _ = mlp_tangent("random")
    residual_XO = torch.zeros(len(tangent.entering_XD), OUTPUTS, dtype=torch.float64)
    assert list(gauss_newton([Residuals(tangent=tangent, residual_XO=residual_XO)], ridge_rel=0.1, iterations=5)) == []
