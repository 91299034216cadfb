"""Gauss-Newton steps against least squares on Jacobians built entry by entry, float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from corp_deploy.algebra.gauss_newton import Lacking, gauss_newton
from corp_deploy.algebra.tangents import ChannelTangent, HeadTangent, with_one

TOKENS, INPUTS, HIDDEN, OUTPUTS, HEADS, QK, V = 6, 3, 4, 3, 2, 2, 3


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_kind(x: Tensor, kind: str) -> Tensor:
    """Random, nearly dependent or exactly dependent inputs."""
    if kind == "ill-conditioned":
        return torch.cat((x[..., :-1], x[..., :1] + 1e-4 * x[..., -1:]), dim=-1)
    return torch.cat((x[..., :-1], x[..., :1]), dim=-1) if kind == "singular" else x


def mlp(entering_XD: Tensor, first_RD: Tensor, last_OR: Tensor) -> Tensor:
    return F.gelu(entering_XD @ first_RD.mT) @ last_OR.mT


def attention(entering_BND: Tensor, first_RD: Tensor, last_OK: Tensor, bias_N: Tensor) -> Tensor:
    """Token by token, head by head."""
    out = torch.zeros(*entering_BND.shape[:2], OUTPUTS, dtype=torch.float64)
    for image, x_ND in enumerate(entering_BND):
        rows_NR = x_ND @ first_RD.mT
        z = []
        for head in range(HEADS):
            q, k = (rows_NR[:, at + head * QK : at + (head + 1) * QK] for at in (0, HEADS * QK))
            v = rows_NR[:, 2 * HEADS * QK + head * V : 2 * HEADS * QK + (head + 1) * V]
            z.append(torch.stack([torch.softmax(0.7 * k @ q[n] + bias_N, dim=0) @ v for n in range(len(x_ND))]))
        out[image] = torch.cat(z, dim=1) @ last_OK.mT
    return out.flatten(0, 1)


def jacobian(outputs: Callable[[Tensor], Tensor], first_RD: Tensor) -> Tensor:
    """[X O, R D] by central differences, one weight at a time."""
    columns, width = [], 1e-5
    for index in range(first_RD.numel()):
        change = torch.zeros(first_RD.numel(), dtype=torch.float64)
        change[index] = width
        ahead, behind = (outputs(first_RD + sign * change.view_as(first_RD)) for sign in (1, -1))
        columns.append(((ahead - behind) / (2 * width)).flatten())
    return torch.stack(columns, dim=1)


def channels(kind: str) -> tuple[ChannelTangent, Callable[[Tensor], Tensor], Tensor]:
    entering_XD = with_one(of_kind(normal(40, INPUTS, seed=0), kind))
    first_RD, last_OR = normal(HIDDEN, INPUTS + 1, seed=1), normal(OUTPUTS, HIDDEN, seed=2)
    z_XR = (entering_XD @ first_RD.mT).requires_grad_()
    (slope_XR,) = torch.autograd.grad(F.gelu(z_XR).sum(), z_XR)
    tangent = ChannelTangent(entering_XD=entering_XD, slope_XR=slope_XR, last_OR=last_OR)
    return tangent, lambda first: mlp(entering_XD, first, last_OR), first_RD


def heads(kind: str, *, values_only: bool = False) -> tuple[HeadTangent, Callable[[Tensor], Tensor], Tensor]:
    entering_BND = with_one(of_kind(normal(8, TOKENS, INPUTS, seed=3), kind))
    rows = HEADS * (2 * QK + V)
    first_RD, last_OK = normal(rows, INPUTS + 1, seed=4), normal(OUTPUTS, HEADS * V, seed=5)
    bias_N = normal(TOKENS, seed=6)
    q, k, v = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (entering_BND @ first_RD.mT).split((HEADS * QK, HEADS * QK, HEADS * V), dim=-1)
    )
    chance = torch.softmax(0.7 * q @ k.mT + bias_N, dim=-1)
    tangent = HeadTangent(
        entering_BND=entering_BND,
        q_BHNQ=q,
        k_BHNQ=k,
        v_BHNV=v,
        chance_BHNN=chance,
        last_OK=last_OK,
        scale=0.7,
        values_only=values_only,
    )
    return tangent, lambda first: attention(entering_BND, first, last_OK, bias_N), first_RD


@pytest.mark.parametrize("build", [channels, heads])
def test_tangents_are_the_derivative_and_its_transpose(
    build: Callable[[str], tuple[ChannelTangent | HeadTangent, Callable[[Tensor], Tensor], Tensor]],
) -> None:
    tangent, outputs, first_RD = build("random")
    jacobian_YP = jacobian(outputs, first_RD)
    step_RD, out = normal(*first_RD.shape, seed=7), normal(len(tangent.entering_XD), OUTPUTS, seed=8)
    torch.testing.assert_close(tangent.along(step_RD).flatten(), jacobian_YP @ step_RD.flatten(), rtol=1e-6, atol=1e-7)
    back_RD = Lacking(tangent=tangent, lacking_XO=out).back(out)
    torch.testing.assert_close(back_RD.flatten(), jacobian_YP.T @ out.flatten(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "singular"])
@pytest.mark.parametrize("build", [channels, heads])
@pytest.mark.parametrize("ridge_rel", [1e-3, 1.0])
def test_the_step_is_the_damped_least_squares_of_the_jacobian(
    build: Callable[[str], tuple[ChannelTangent | HeadTangent, Callable[[Tensor], Tensor], Tensor]],
    kind: str,
    ridge_rel: float,
) -> None:
    """Tokens weigh differently; some weigh nothing."""
    tangent, outputs, first_RD = build(kind)
    lacking_XO = normal(len(tangent.entering_XD), OUTPUTS, seed=9)
    weight_X = torch.arange(len(lacking_XO)).double() % 4
    pieces = [Lacking(tangent=tangent, lacking_XO=lacking_XO, weight_X=weight_X)]
    step_RD = list(gauss_newton(pieces, ridge_rel=ridge_rel, iterations=400))[-1]
    jacobian_YP = jacobian(outputs, first_RD)
    root_Y = weight_X.repeat_interleave(OUTPUTS).sqrt() / weight_X.sum().sqrt()
    ridge = ridge_rel * ridge_scale(tangent, weight_X)
    rows = torch.cat((jacobian_YP * root_Y[:, None], ridge**0.5 * torch.eye(first_RD.numel(), dtype=torch.float64)))
    target = torch.cat((lacking_XO.flatten() * root_Y, torch.zeros(first_RD.numel(), dtype=torch.float64)))
    expected = torch.linalg.lstsq(rows, target[:, None], driver="gelsd").solution
    torch.testing.assert_close(step_RD.flatten(), expected[:, 0], rtol=1e-4, atol=1e-5)


def ridge_scale(tangent: ChannelTangent | HeadTangent, weight_X: Tensor) -> float:
    """Mean of the product's diagonal, as the docstring has it, by sums over tokens."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (len(weight_X), OUTPUTS), generator=generator).double() * 2 - 1
    g_XR = tangent.sensitivity(sign * weight_X.sqrt()[:, None])
    u_XD = tangent.entering_XD
    g_R = sum(g.square() for g in g_XR) / weight_X.sum()
    u_D = sum(u.square() for u in u_XD) / len(u_XD)
    return float(torch.as_tensor(g_R).mean() * torch.as_tensor(u_D).mean())


def test_values_alone_are_exact_least_squares_and_leave_queries_and_keys() -> None:
    tangent, outputs, first_RD = heads("random", values_only=True)
    wanted = normal(len(tangent.entering_XD), OUTPUTS, seed=10)
    pieces = [Lacking(tangent=tangent, lacking_XO=wanted - outputs(first_RD))]
    step_RD = list(gauss_newton(pieces, ridge_rel=0.0, iterations=400))[-1]
    assert bool((step_RD[: 2 * HEADS * QK] == 0.0).all())
    zero = torch.zeros_like(first_RD)
    zero[: 2 * HEADS * QK] = first_RD[: 2 * HEADS * QK]
    columns = []
    for row in range(2 * HEADS * QK, len(first_RD)):
        for column in range(INPUTS + 1):
            one = zero.clone()
            one[row, column] = 1.0
            columns.append(outputs(one).flatten())
    design = torch.stack(columns, dim=1)  # the outputs are linear in the values
    best = design @ torch.linalg.lstsq(design, wanted.flatten()[:, None], driver="gelsd").solution
    left = (wanted.flatten() - best[:, 0]).square().sum()
    torch.testing.assert_close((wanted - outputs(first_RD + step_RD)).square().sum(), left, rtol=1e-9, atol=0.0)


def test_pieces_add_up_and_a_planted_step_comes_back() -> None:
    tangent, _, first_RD = channels("random")
    planted_RD = normal(*first_RD.shape, seed=11)
    lacking_XO = tangent.along(planted_RD)

    def piece(tokens: slice) -> Lacking:
        part = ChannelTangent(
            entering_XD=tangent.entering_XD[tokens], slope_XR=tangent.slope_XR[tokens], last_OR=tangent.last_OR
        )
        return Lacking(tangent=part, lacking_XO=lacking_XO[tokens])

    pieces = [piece(slice(0, 13)), piece(slice(13, None))]
    *_, step_RD = gauss_newton(pieces, ridge_rel=0.0, iterations=200)
    torch.testing.assert_close(step_RD, planted_RD, rtol=1e-6, atol=1e-6)


def test_nothing_lacking_is_no_step() -> None:
    tangent, _, _ = channels("random")
    lacking_XO = torch.zeros(len(tangent.entering_XD), OUTPUTS, dtype=torch.float64)
    assert list(gauss_newton([Lacking(tangent=tangent, lacking_XO=lacking_XO)], ridge_rel=0.1, iterations=5)) == []
