"""Closed forms of MLPs and of values, compared with least squares and SVDs on raw samples."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from corp_deploy.algebra import channels as recover_mlp
from corp_deploy.algebra import values as recover_values
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.quadratic import solve_ridge
from corp_deploy.algebra.values import ValueRecovery

Array = NDArray[np.floating[Any]]
FORMS = (recover_mlp.none, recover_mlp.bias, recover_mlp.gram, recover_mlp.affine, recover_mlp.affine_v1)


def samples_of(channels: int, tokens: int, *, seed: int, rank: int, scale: float = 0.0) -> Tensor:
    """Draw [tokens, F] with a mean of each channel; `scale` spreads the channels over so many decades."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank, channels, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, rank, generator=generator, dtype=torch.float64) @ mix
    x += torch.randn(channels, generator=generator, dtype=torch.float64)
    return x * torch.logspace(0, -scale, channels, dtype=torch.float64)


def layer_of(outputs: int, channels: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(outputs, channels, generator=generator, dtype=torch.float64)
    return weight, torch.randn(outputs, generator=generator, dtype=torch.float64)


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(dim=0), x.T @ x / x.shape[0]


def error_on(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, result: ChannelRecovery) -> float:
    """Compute E||y - y'||^2 on the samples."""
    lost = x @ weight.T + bias - x[:, kept] @ result.weight_OK.T - result.bias_O
    return float(lost.square().sum(dim=1).mean())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rank", "scale"), [(12, 0.0), (5, 0.0), (12, 3.0)])
def test_residuals_equal_those_of_the_samples(form: Any, rank: int, scale: float) -> None:
    x = samples_of(12, 80, seed=3, rank=rank, scale=scale)
    weight, bias = layer_of(4, 12, seed=3)
    kept = torch.tensor([0, 2, 3, 7, 8, 11])
    result = form(*moments_of(x), weight, bias, kept, ridge_rel=1e-4)
    dropped = recover_mlp.none(*moments_of(x), weight, bias, kept, ridge_rel=1e-4)
    assert result.residual == pytest.approx(error_on(x, weight, bias, kept, result), rel=1e-8, abs=1e-12)
    assert result.residual_uncompensated == pytest.approx(error_on(x, weight, bias, kept, dropped), rel=1e-9)
    left, lost = (x @ weight.T - x[:, kept] @ each.weight_OK.T for each in (result, dropped))
    explained = 1.0 - float(left.var(dim=0, correction=0).sum() / lost.var(dim=0, correction=0).sum())
    assert result.r2 == pytest.approx(explained, rel=1e-7, abs=1e-9)
    kept_x = x[:, kept] - x[:, kept].mean(dim=0) if form is recover_mlp.affine else x[:, kept]
    spread = 0.0 if form in (recover_mlp.none, recover_mlp.bias) else float(kept_x.square().mean())
    assert result.ridge == pytest.approx(1e-4 * spread)


@pytest.mark.parametrize(("rank", "scale"), [(10, 0.0), (4, 0.0), (10, 4.0)])
def test_corp_v1_fits_uncentred_and_then_matches_the_mean(rank: int, scale: float) -> None:
    x = samples_of(10, 60, seed=2, rank=rank, scale=scale)
    weight, bias = layer_of(3, 10, seed=2)
    kept, pruned = [1, 2, 5, 8, 9], [0, 3, 4, 6, 7]
    result = recover_mlp.affine_v1(*moments_of(x), weight, bias, torch.tensor(kept), ridge_rel=1e-3)
    a, w = x.numpy(), weight.numpy()
    ridge = 1e-3 * np.square(a[:, kept]).mean(0).mean()
    rows = np.vstack((a[:, kept] / 60**0.5, ridge**0.5 * np.eye(5)))
    b_PK = np.linalg.lstsq(rows, np.vstack((a[:, pruned] / 60**0.5, np.zeros((5, 5)))), rcond=None)[0].T
    c_P = a.mean(0)[pruned] - b_PK @ a.mean(0)[kept]
    np.testing.assert_allclose(result.weight_OK, w[:, kept] + w[:, pruned] @ b_PK, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(result.bias_O, bias.numpy() + w[:, pruned] @ c_P, rtol=1e-6, atol=1e-9)
    mean_F = x.mean(dim=0)
    torch.testing.assert_close(result.weight_OK @ mean_F[kept] + result.bias_O, weight @ mean_F + bias)


def test_bias_and_none_keep_the_columns() -> None:
    x, (weight, bias), kept = samples_of(6, 50, seed=2, rank=6), layer_of(3, 6, seed=2), torch.tensor([0, 4])
    plain, moved = (form(*moments_of(x), weight, bias, kept, ridge_rel=1e-4) for form in FORMS[:2])
    assert torch.equal(plain.weight_OK, weight[:, kept])
    assert torch.equal(moved.weight_OK, weight[:, kept])
    assert torch.equal(plain.bias_O, bias)
    torch.testing.assert_close(moved.bias_O, bias + sum(weight[:, j] * float(x[:, j].mean()) for j in (1, 2, 3, 5)))
    assert (plain.condition, plain.ridge) == (1.0, 0.0)


def test_planted_map_is_recovered() -> None:
    """Pruned channels are affine in the kept ones, so the recovery is exact."""
    kept_x = samples_of(5, 100, seed=5, rank=5)
    generator = torch.Generator().manual_seed(6)
    map_PK = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    shift_P = torch.randn(4, generator=generator, dtype=torch.float64)
    x = torch.cat((kept_x, kept_x @ map_PK.T + shift_P), dim=1)
    weight, bias = layer_of(3, 9, seed=5)
    result = recover_mlp.affine(*moments_of(x), weight, bias, torch.arange(5), ridge_rel=0.0)
    torch.testing.assert_close(result.weight_OK, weight[:, :5] + weight[:, 5:] @ map_PK)
    torch.testing.assert_close(result.bias_O, bias + weight[:, 5:] @ shift_P)
    assert result.residual < 1e-12 * result.residual_uncompensated
    assert result.r2 == pytest.approx(1.0)


@given(
    seed=st.integers(0, 10_000),
    rank=st.integers(1, 14),
    scale=st.sampled_from([0.0, 2.0, 6.0]),
    ridge_rel=st.sampled_from([0.0, 1e-8, 1e-4, 1e-1]),
)
@settings(max_examples=60, deadline=None)
def test_no_centred_recovery_is_worse_than_dropping(seed: int, rank: int, scale: float, ridge_rel: float) -> None:
    x = samples_of(14, 30, seed=seed, rank=rank, scale=scale)
    weight, bias = layer_of(3, 14, seed=seed)
    kept = torch.randperm(14, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 13].sort().values
    results = [form(*moments_of(x), weight, bias, kept, ridge_rel=ridge_rel) for form in FORMS]
    none, bias_only, gram, affine, _ = (result.residual for result in results)
    slack = 1.0 + 1e-9
    assert bias_only <= none * slack + 1e-12
    if ridge_rel == 0.0 and scale == 0.0:
        assert gram <= none * slack + 1e-9
    assert affine <= bias_only * slack + 1e-12
    for result in results:
        assert bool(torch.isfinite(result.weight_OK).all())
        assert result.condition >= 1.0
        assert result.residual == pytest.approx(error_on(x, weight, bias, kept, result), rel=1e-5, abs=1e-9)


def test_full_width_loses_nothing() -> None:
    x = samples_of(5, 40, seed=7, rank=5)
    weight, bias = layer_of(3, 5, seed=7)
    for form in FORMS:
        if form is not recover_mlp.gram:
            result = form(*moments_of(x), weight, bias, torch.arange(5), ridge_rel=1e-4)
            torch.testing.assert_close(result.weight_OK, weight)
            assert (result.residual, result.residual_uncompensated, result.r2) == (0.0, 0.0, 1.0)
    # GRAIL's ridge shrinks the weights at full width, too, so the ridge is all but zero.
    gram = recover_mlp.gram(*moments_of(x), weight, bias, torch.arange(5), ridge_rel=1e-12)
    torch.testing.assert_close(gram.weight_OK, weight)


def test_ridge_solve_equals_lstsq_on_singular_systems_and_reports_the_condition() -> None:
    generator = torch.Generator().manual_seed(8)
    a = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    gram, cross = a.T @ a, torch.randn(2, 4, generator=generator, dtype=torch.float64) @ a
    singular = solve_ridge(cross, gram, ridge_rel=0.0)
    expected = np.linalg.lstsq(gram.numpy(), cross.numpy().T, rcond=1e-10)[0].T
    np.testing.assert_allclose(singular.solution_OK, expected, atol=1e-9)
    assert singular.condition > 1e12
    regular = solve_ridge(cross, gram, ridge_rel=0.1)
    shifted = gram.numpy() + regular.ridge * np.eye(9)
    np.testing.assert_allclose(regular.solution_OK, cross.numpy() @ np.linalg.inv(shifted), rtol=1e-9)
    assert regular.condition == pytest.approx(np.linalg.cond(shifted, 1))
    assert solve_ridge(cross, torch.zeros(9, 9, dtype=torch.float64), ridge_rel=1e-4).solution_OK.abs().max() == 0.0


@pytest.mark.parametrize("rank", [12, 3])
@pytest.mark.parametrize("ridge_rel", [1e-4, 1e-1, 10.0])
def test_condition_is_bounded(rank: int, ridge_rel: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(40, rank, generator=generator, dtype=torch.float64) @ torch.logspace(-3, 2, rank).double().diag()
    x = x @ torch.randn(rank, 12, generator=generator, dtype=torch.float64)
    gram, cross = x.T @ x / 40, torch.randn(5, 12, generator=generator, dtype=torch.float64)
    exact, bounded = (solve_ridge(cross, gram, ridge_rel=ridge_rel, bound=bound) for bound in (False, True))
    assert torch.equal(exact.solution_OK, bounded.solution_OK)
    shifted = gram + exact.ridge * torch.eye(12, dtype=torch.float64)
    assert exact.condition == pytest.approx(float(torch.linalg.cond(shifted, p=1)), rel=1e-6)
    assert exact.condition <= bounded.condition < 1e12
    weak = [solve_ridge(cross, gram, ridge_rel=1e-13, bound=bound) for bound in (False, True)]
    assert torch.equal(weak[0].solution_OK, weak[1].solution_OK)
    assert weak[0].condition == weak[1].condition, "with a bound this loose the condition is computed"


# Values and the output projection at a smaller width

HEADS, DIM, OUTPUTS = 3, 5, 8


def layer(seed: int, *, tokens: int = 300, rank: int = HEADS * DIM) -> tuple[Tensor, Tensor, Tensor]:
    """Draw z [tokens, C] with means and correlations across heads, and the projection's weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank, HEADS * DIM, generator=generator, dtype=torch.float64)
    z = torch.randn(tokens, rank, generator=generator, dtype=torch.float64) @ mix
    z += 2.0 * torch.randn(HEADS * DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(OUTPUTS, HEADS * DIM, generator=generator, dtype=torch.float64)
    return z, weight, torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)


def shortened(z: Tensor, result: ValueRecovery) -> Tensor:
    return torch.cat([z[:, h * DIM : (h + 1) * DIM] @ v_map.T for h, v_map in enumerate(result.v_map_HRV)], dim=1)


def value_error(z: Tensor, weight: Tensor, bias: Tensor, result: ValueRecovery) -> float:
    lost = z @ weight.T + bias - shortened(z, result) @ result.weight_OK.T - result.bias_O
    return float(lost.square().sum(dim=1).mean())


@pytest.mark.parametrize("width", [1, 3, DIM])
def test_maps_equal_the_truncated_svd_of_each_heads_output(width: int) -> None:
    z, weight, bias = layer(0)
    result = recover_values.lowrank_values(*moments_of(z), weight, bias, HEADS, width, ridge_rel=1e12, sweeps=0)
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
    result = recover_values.lowrank_values(*moments_of(z), weight, bias, HEADS, 2, ridge_rel=1e-12, sweeps=0)
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
def test_value_recovery_is_exact_and_never_worse_than_dropping(
    seed: int, rank: int, width: int, ridge_rel: float
) -> None:
    z, weight, bias = layer(seed, tokens=40, rank=rank)
    total = float((z @ weight.T).square().sum(dim=1).mean())
    fit = partial(recover_values.lowrank_values, *moments_of(z), weight, bias, HEADS, width, ridge_rel=ridge_rel)
    errors = [fit(sweeps=sweeps).residual for sweeps in (0, 1, 3)]
    assert errors[2] <= errors[1] + 1e-7 * total
    assert errors[1] <= errors[0] + 1e-7 * total
    result = fit()
    assert result.residual <= result.residual_uncompensated + 1e-6 * total
    assert result.residual == pytest.approx(value_error(z, weight, bias, result), rel=1e-5, abs=1e-7 * total)
    for v_map in result.v_map_HRV:  # with orthonormal rows, new values have the scale of the old ones
        torch.testing.assert_close(v_map @ v_map.T, torch.eye(width, dtype=torch.float64))
    assert result.condition >= 1.0


def test_alternating_sweeps_divide_directions_between_heads() -> None:
    """Two heads hold the same three directions, which widths of 2 span if the heads take different ones."""
    generator = torch.Generator().manual_seed(5)
    code = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    z = torch.cat((code, code), dim=1) * torch.tensor([3.0, 2.0, 1.5, 3.0, 2.0, 1.5], dtype=torch.float64)
    weight = torch.eye(3, dtype=torch.float64).repeat(1, 2)
    alone = recover_values.lowrank_values(*moments_of(z), weight, None, 2, 2, ridge_rel=1e-6, sweeps=0)
    shared = recover_values.lowrank_values(*moments_of(z), weight, None, 2, 2, ridge_rel=1e-6, sweeps=5)
    assert alone.residual > 0.5
    assert shared.residual < 1e-3 * alone.residual


def test_uncompensated_reduction_drops_the_least_coordinates() -> None:
    z, weight, bias = layer(2)
    result = recover_values.lowrank_values(*moments_of(z), weight, bias, HEADS, 3, ridge_rel=1e-4)
    kept = []
    for head in range(HEADS):
        score = [float((z[:, j] ** 2).mean() * (weight[:, j] ** 2).sum()) for j in range(head * DIM, (head + 1) * DIM)]
        kept += [head * DIM + j for j in sorted(range(DIM), key=lambda j: -score[j])[:3]]
    dropped = [j for j in range(HEADS * DIM) if j not in kept]
    expected = float((z[:, dropped] @ weight[:, dropped].T).square().sum(dim=1).mean())
    assert result.residual_uncompensated == pytest.approx(expected)
    assert result.residual < 0.5 * expected
    assert result.r2 == pytest.approx(1.0 - result.residual / expected)


def test_full_width_equals_the_dense_layer() -> None:
    z, weight, bias = layer(3)
    full = recover_values.lowrank_values(*moments_of(z), weight, bias, HEADS, DIM, ridge_rel=1e-4)
    kept = recover_values.keep_values(weight, bias, HEADS)
    dense = z @ weight.T + bias
    for result in (full, kept):
        torch.testing.assert_close(shortened(z, result) @ result.weight_OK.T + result.bias_O, dense)
        assert result.residual < 1e-20 * float(dense.square().mean())
    assert torch.equal(kept.weight_OK, weight)
    assert recover_values.keep_values(weight, None, HEADS).bias_O.abs().max() == 0.0


def test_fewer_outputs_than_values_are_reproduced_exactly() -> None:
    """The projection reads as many directions as it has outputs, 3 of the 4 that are kept."""
    z, weight, bias = layer(4)
    few, few_bias = weight[:3], bias[:3]
    result = recover_values.lowrank_values(*moments_of(z), few, few_bias, HEADS, 4, ridge_rel=1e-9)
    assert result.v_map_HRV.shape == (HEADS, 4, DIM)
    assert value_error(z, few, few_bias, result) < 1e-9 * float((z @ few.T).var(dim=0).sum())


def test_small_variation_beside_a_large_mean_is_solved_accurately() -> None:
    """Values of rank 2 in each head, with float32 moments, are recovered with small weights and next to no loss."""
    generator = torch.Generator().manual_seed(5)
    mix = torch.block_diag(*torch.randn(HEADS, 2, DIM, generator=generator, dtype=torch.float64))
    z = 5.0 + 0.01 * torch.randn(400, 2 * HEADS, generator=generator, dtype=torch.float64) @ mix
    _, weight, bias = layer(6)
    mean, second = moments_of(z.float())
    assert float(torch.linalg.eigvalsh(second.double() - torch.outer(mean.double(), mean.double()))[0]) < 0.0
    result = recover_values.lowrank_values(mean.double(), second.double(), weight, bias, HEADS, 2, ridge_rel=1e-9)
    assert float(result.weight_OK.abs().max()) < 100.0
    assert value_error(z, weight, bias, result) < 0.02 * float((z @ weight.T).var(dim=0).sum())
