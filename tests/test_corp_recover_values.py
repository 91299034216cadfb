"""Values and the output projection at a smaller width, against SVDs and least squares on raw samples."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from corp_deploy.algebra import values as recover_values
from corp_deploy.algebra.values import ValueRecovery

Array = NDArray[np.floating[Any]]
HEADS, DIM, OUTPUTS = 3, 5, 8


def layer(seed: int, *, tokens: int = 300, rank: int = HEADS * DIM) -> tuple[Tensor, Tensor, Tensor]:
    """z [tokens, C] with means and correlation across heads, the projection's weight and its bias."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank, HEADS * DIM, generator=generator, dtype=torch.float64)
    z = torch.randn(tokens, rank, generator=generator, dtype=torch.float64) @ mix
    z += 2.0 * torch.randn(HEADS * DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(OUTPUTS, HEADS * DIM, generator=generator, dtype=torch.float64)
    return z, weight, torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)


def moments_of(z: Tensor) -> tuple[Tensor, Tensor]:
    return z.mean(dim=0), z.T @ z / z.shape[0]


def shortened(z: Tensor, result: ValueRecovery) -> Tensor:
    return torch.cat([z[:, h * DIM : (h + 1) * DIM] @ v_map.T for h, v_map in enumerate(result.v_map_HRV)], dim=1)


def error_on(z: Tensor, weight: Tensor, bias: Tensor, result: ValueRecovery) -> float:
    lost = z @ weight.T + bias - shortened(z, result) @ result.weight_OK.T - result.bias_O
    return float(lost.square().sum(dim=1).mean())


@pytest.mark.parametrize("width", [1, 3, DIM])
def test_maps_are_the_truncated_svd_of_each_heads_output(width: int) -> None:
    z, weight, bias = layer(0)
    result = recover_values.lowrank(*moments_of(z), weight, bias, HEADS, width, ridge_rel=1e12, sweeps=0)
    spectrum = recover_values.lowrank_spectrum(*moments_of(z), weight, HEADS)
    centred: Array = (z - z.mean(dim=0)).numpy()
    for head in range(HEADS):
        own = slice(head * DIM, (head + 1) * DIM)
        output = centred[:, own] @ weight[:, own].numpy().T
        u, s, vt = np.linalg.svd(output, full_matrices=False)
        new = slice(head * width, (head + 1) * width)
        got = centred[:, own] @ result.v_map_HRV[head].numpy().T @ result.weight_OK[:, new].numpy().T
        np.testing.assert_allclose(got, (u[:, :width] * s[:width]) @ vt[:width], atol=1e-7 * s[0])
        assert float(spectrum[head, width]) == pytest.approx(float(np.square(s[width:]).sum()) / len(z), abs=1e-9)
    assert spectrum.shape == (HEADS, DIM + 1)


def test_refit_is_least_squares_over_all_heads() -> None:
    z, weight, bias = layer(1)
    result = recover_values.lowrank(*moments_of(z), weight, bias, HEADS, 2, ridge_rel=1e-12, sweeps=0)
    inputs = np.hstack((shortened(z, result).numpy(), np.ones((len(z), 1))))
    target = (z @ weight.T + bias).numpy()
    fitted = np.linalg.lstsq(inputs, target, rcond=None)[0].T
    np.testing.assert_allclose(result.weight_OK, fitted[:, :-1], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(result.bias_O, fitted[:, -1], rtol=1e-6, atol=1e-8)
    per_head = float(recover_values.lowrank_spectrum(*moments_of(z), weight, HEADS)[:, 2].sum())
    assert result.residual < 0.95 * per_head


@given(
    seed=st.integers(0, 10_000),
    rank=st.integers(1, HEADS * DIM),
    width=st.integers(1, DIM),
    ridge_rel=st.sampled_from([0.0, 1e-8, 1e-4, 1e-1, 1e6]),
)
@settings(max_examples=30, deadline=None)
def test_never_worse_than_dropping_and_exact(seed: int, rank: int, width: int, ridge_rel: float) -> None:
    z, weight, bias = layer(seed, tokens=40, rank=rank)
    result = recover_values.lowrank(*moments_of(z), weight, bias, HEADS, width, ridge_rel=ridge_rel)
    total = float((z @ weight.T).square().sum(dim=1).mean())
    errors = [
        recover_values.lowrank(*moments_of(z), weight, bias, HEADS, width, ridge_rel=ridge_rel, sweeps=sweeps).residual
        for sweeps in (0, 1, 3)
    ]
    assert errors[2] <= errors[1] + 1e-7 * total
    assert errors[1] <= errors[0] + 1e-7 * total
    assert result.residual <= result.residual_uncompensated + 1e-6 * total
    assert result.residual == pytest.approx(error_on(z, weight, bias, result), rel=1e-5, abs=1e-7 * total)
    for v_map in result.v_map_HRV:  # rows orthonormal: new values at the scale of the old
        torch.testing.assert_close(v_map @ v_map.T, torch.eye(width, dtype=torch.float64))
    assert result.condition >= 1.0


def test_sweeps_share_the_work_between_heads() -> None:
    """Two heads say the same three things: width 2 each is enough, if and only if the heads look at one another."""
    generator = torch.Generator().manual_seed(5)
    code = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    z = torch.cat((code, code), dim=1) * torch.tensor([3.0, 2.0, 1.5, 3.0, 2.0, 1.5], dtype=torch.float64)
    weight = torch.eye(3, dtype=torch.float64).repeat(1, 2)
    alone = recover_values.lowrank(*moments_of(z), weight, None, 2, 2, ridge_rel=1e-6, sweeps=0)
    shared = recover_values.lowrank(*moments_of(z), weight, None, 2, 2, ridge_rel=1e-6, sweeps=5)
    assert alone.residual > 0.5
    assert shared.residual < 1e-3 * alone.residual


def test_what_is_uncompensated_drops_the_least_coordinates() -> None:
    z, weight, bias = layer(2)
    result = recover_values.lowrank(*moments_of(z), weight, bias, HEADS, 3, ridge_rel=1e-4)
    kept = []
    for head in range(HEADS):
        score = [float((z[:, j] ** 2).mean() * (weight[:, j] ** 2).sum()) for j in range(head * DIM, (head + 1) * DIM)]
        kept += [head * DIM + j for j in sorted(range(DIM), key=lambda j: -score[j])[:3]]
    dropped = [j for j in range(HEADS * DIM) if j not in kept]
    expected = float((z[:, dropped] @ weight[:, dropped].T).square().sum(dim=1).mean())
    assert result.residual_uncompensated == pytest.approx(expected)
    assert result.residual < 0.5 * expected
    assert result.r2 == pytest.approx(1.0 - result.residual / expected)


def test_full_width_and_keep_are_the_dense_layer() -> None:
    z, weight, bias = layer(3)
    full = recover_values.lowrank(*moments_of(z), weight, bias, HEADS, DIM, ridge_rel=1e-4)
    kept = recover_values.keep(weight, bias, HEADS)
    dense = z @ weight.T + bias
    for result in (full, kept):
        torch.testing.assert_close(shortened(z, result) @ result.weight_OK.T + result.bias_O, dense)
        assert result.residual < 1e-20 * float(dense.square().mean())
    assert torch.equal(kept.weight_OK, weight)
    assert recover_values.keep(weight, None, HEADS).bias_O.abs().max() == 0.0


def test_planted_low_rank_values_come_back_with_their_mean() -> None:
    """Each head moves in two directions about a far mean: width 2 loses nothing, dropping coordinates a lot."""
    generator = torch.Generator().manual_seed(4)
    basis = torch.randn(HEADS, 2, DIM, generator=generator, dtype=torch.float64)
    code = torch.randn(200, HEADS, 2, generator=generator, dtype=torch.float64)
    z = torch.einsum("nhr,hrv->nhv", code, basis).flatten(1) + 10.0
    _, weight, _ = layer(4)
    result = recover_values.lowrank(*moments_of(z), weight, None, HEADS, 2, ridge_rel=1e-4)
    assert result.residual < 1e-9 * result.residual_uncompensated
    got = shortened(z, result) @ result.weight_OK.T + result.bias_O
    torch.testing.assert_close(got, z @ weight.T, rtol=1e-4, atol=1e-4)


def test_fewer_outputs_than_values_leave_nothing_out() -> None:
    """As many directions as outputs are all that is read, and further ones are of no use."""
    z, weight, bias = layer(4)
    few, few_bias = weight[:3], bias[:3]
    result = recover_values.lowrank(*moments_of(z), few, few_bias, HEADS, 4, ridge_rel=1e-9)
    assert result.v_map_HRV.shape == (HEADS, 4, DIM)
    assert error_on(z, few, few_bias, result) < 1e-9 * float((z @ few.T).var(dim=0).sum())


def test_what_hardly_changes_beside_its_mean_is_solved_without_noise() -> None:
    """Of rank 2 in each head and small beside the mean, its moments in single precision: least squares on the samples
    loses nothing, and neither does this, with weights no larger than it needs.
    """
    generator = torch.Generator().manual_seed(5)
    mix = torch.block_diag(*torch.randn(HEADS, 2, DIM, generator=generator, dtype=torch.float64))
    z = 5.0 + 0.01 * torch.randn(400, 2 * HEADS, generator=generator, dtype=torch.float64) @ mix
    _, weight, bias = layer(6)
    mean, second = moments_of(z.float())
    assert float(torch.linalg.eigvalsh(second.double() - torch.outer(mean.double(), mean.double()))[0]) < 0.0
    result = recover_values.lowrank(mean.double(), second.double(), weight, bias, HEADS, 2, ridge_rel=1e-9)
    assert float(result.weight_OK.abs().max()) < 100.0
    assert error_on(z, weight, bias, result) < 0.02 * float((z @ weight.T).var(dim=0).sum())
