"""Recoveries of a convolution, compared with real convolutions and with least squares on patches cut out by loops."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from corp_deploy.algebra import channels, scores
from corp_deploy.algebra.block_obs import eliminate_blocks
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.patches import PatchStatistics, columns, recover_convolution, rescale_outputs

Array = NDArray[np.floating[Any]]
FORMS = ["affine", "bias", "gram", "im2col", "none"]


def maps_of(images: int, count: int, *, side: int, seed: int, rank: int | None = None) -> Tensor:
    """Draw maps [images, C, side, side] of channels that share a few patterns, behind a ReLU."""
    generator = torch.Generator().manual_seed(seed)
    rank = rank or count // 2
    mix = torch.randn(count, rank, generator=torch.Generator().manual_seed(100), dtype=torch.float64) / rank**0.5
    pattern = torch.randn(images, rank, side, side, generator=generator, dtype=torch.float64)
    noise = torch.randn(images, count, side, side, generator=generator, dtype=torch.float64)
    return (torch.einsum("cr,nrhw->nchw", mix, pattern) + 0.05 * noise + 1.0).relu()


def conv_of(outputs: int, count: int, kernel: int, *, seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, count, kernel, kernel, generator=generator, dtype=torch.float64)
    return weight, torch.randn(outputs, generator=generator, dtype=torch.float64)


def patches_by_hand(maps: Tensor, kernel: int, padding: int, stride: int = 1) -> Tensor:
    """Cut patches [places of all images, C k k], image by image and place by place, with zeros outside the map."""
    images, count, height, width = maps.shape
    x: Array = maps.numpy()
    rows = []
    for image in range(images):
        for top in range(-padding, height + padding - kernel + 1, stride):
            for left in range(-padding, width + padding - kernel + 1, stride):
                patch = np.zeros((count, kernel, kernel))
                for i in range(kernel):
                    for j in range(kernel):
                        if 0 <= top + i < height and 0 <= left + j < width:
                            patch[:, i, j] = x[image, :, top + i, left + j]
                rows.append(patch.reshape(-1))
    return torch.from_numpy(np.stack(rows))


def statistics_of(maps: Tensor, u: Tensor) -> PatchStatistics:
    x = maps.permute(0, 2, 3, 1).flatten(0, 2)
    return PatchStatistics(
        mean_U=u.mean(dim=0),
        second_UU=u.T @ u / u.shape[0],
        mean_C=x.mean(dim=0),
        second_CC=x.T @ x / x.shape[0],
        taps=u.shape[1] // x.shape[1],
    )


def error_of_conv(
    maps: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, result: ChannelRecovery, padding: int, stride: int = 1
) -> float:
    """Compute E||y - y'||^2 over places by running both convolutions."""
    new = result.weight_OK.view(weight.shape[0], kept.numel(), *weight.shape[2:])
    dense = F.conv2d(maps, weight, bias, stride=stride, padding=padding)
    left = dense - F.conv2d(maps[:, kept], new, result.bias_O, stride=stride, padding=padding)
    return float(left.square().sum(dim=1).mean())


def test_columns_follow_the_flattened_weights() -> None:
    weight, _ = conv_of(3, 5, 2)
    kept = torch.tensor([0, 3, 4])
    assert columns(kept, 4).dtype == torch.int64
    assert torch.equal(weight.flatten(1)[:, columns(kept, 4)], weight[:, kept].flatten(1))
    assert columns(kept[:0], 4).shape == (0,)


SHAPES = [(3, 1, 1), (3, 1, 2), (1, 0, 1), (2, 0, 2), (3, 0, 1)]  # kernel, padding, stride
KINDS = ["random", "duplicates", "dead", "few"]


def hard_maps(kind: str) -> Tensor:
    """Make maps of six channels, of which 4 and 5 copy others, or 3 and 5 are dead and 2 constant, or of few places."""
    if kind == "few":
        return maps_of(2, 6, side=3, seed=3)
    maps = maps_of(6, 6, side=5, seed=3)
    if kind == "duplicates":
        maps[:, 4] = 2.0 * maps[:, 1] + 1e-7 * maps[:, 0]
        maps[:, 5] = 0.5 * maps[:, 2]
    if kind == "dead":
        maps[:, 3], maps[:, 5], maps[:, 2] = 0.0, 0.0, 0.7
    return maps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kernel", "padding", "stride"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_errors_equal_those_of_the_convolutions(form: str, kernel: int, padding: int, stride: int, kind: str) -> None:
    maps, (weight, bias) = hard_maps(kind), conv_of(4, 6, kernel)
    kept = torch.tensor([0, 1, 2, 5])
    stats = statistics_of(maps, patches_by_hand(maps, kernel, padding, stride))
    result = recover_convolution(form, stats, weight.flatten(1), bias, kept, ridge_rel=1e-4)
    dropped = recover_convolution("none", stats, weight.flatten(1), bias, kept, ridge_rel=1e-4)
    scale = float(F.conv2d(maps, weight, bias, stride=stride, padding=padding).square().sum(dim=1).mean())
    expected = error_of_conv(maps, weight, bias, kept, result, padding, stride)
    assert result.residual == pytest.approx(expected, rel=1e-7, abs=1e-12 * scale)
    expected = error_of_conv(maps, weight, bias, kept, dropped, padding, stride)
    assert result.residual_uncompensated == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(dropped.weight_OK, weight[:, kept].flatten(1), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("form", FORMS)
def test_full_width_changes_nothing_and_missing_bias_is_added(form: str) -> None:
    maps, (weight, _) = hard_maps("random"), conv_of(4, 6, 3)
    stats = statistics_of(maps, patches_by_hand(maps, 3, 1))
    result = recover_convolution(form, stats, weight.flatten(1), None, torch.arange(6), ridge_rel=0.0)
    torch.testing.assert_close(result.weight_OK, weight.flatten(1), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(result.bias_O, torch.zeros(4, dtype=torch.float64), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_one_by_one_convolution_equals_a_linear_layer(form: str) -> None:
    maps, (weight, bias) = hard_maps("random"), conv_of(4, 6, 1)
    stats, kept = statistics_of(maps, patches_by_hand(maps, 1, 0)), torch.tensor([1, 2, 4])
    result = recover_convolution(form, stats, weight.flatten(1), bias, kept, ridge_rel=1e-3)
    linear = {"none": channels.none, "bias": channels.bias, "gram": channels.gram}.get(form, channels.affine)
    expected = linear(stats.mean_C, stats.second_CC, weight.flatten(1), bias, kept, ridge_rel=1e-3)
    torch.testing.assert_close(result.weight_OK, expected.weight_OK)
    torch.testing.assert_close(result.bias_O, expected.bias_O)
    assert (result.condition, result.ridge) == pytest.approx((expected.condition, expected.ridge))
    assert result.r2 == pytest.approx(expected.r2)


def ridge_fit(x: Array, y: Array, ridge_rel: float) -> Array:
    """Solve for the map [outputs, inputs] of least mean square error plus ridge, by lstsq with ridge rows."""
    ridge = ridge_rel * np.square(x).mean(0).mean()
    rows = np.vstack((x / len(x) ** 0.5, ridge**0.5 * np.eye(x.shape[1])))
    targets = np.vstack((y / len(x) ** 0.5, np.zeros((x.shape[1], y.shape[1]))))
    fitted: Array = np.linalg.lstsq(rows, targets, rcond=1e-13)[0].T
    return fitted


@pytest.mark.parametrize("kind", KINDS)
def test_gram_and_affine_map_each_tap_by_channel_regression(kind: str) -> None:
    """gram is GRAIL's equation and affine is the paper's, each on the channels of the map."""
    maps, (weight, bias) = hard_maps(kind), conv_of(3, 6, 3)
    stats, kept, pruned = statistics_of(maps, patches_by_hand(maps, 3, 1)), [0, 1, 4], [2, 3, 5]
    x: Array = maps.permute(0, 2, 3, 1).flatten(0, 2).numpy()
    mean, centred = x.mean(0), x - x.mean(0)
    b_CK = ridge_fit(x[:, kept], x, 1e-5)
    b_PK = ridge_fit(centred[:, kept], centred[:, pruned], 1e-5)
    w: Array = weight.numpy()
    gram, affine, constant = np.zeros((3, 3, 3, 3)), w[:, kept].copy(), bias.numpy().copy()
    for i in range(3):
        for j in range(3):
            gram[:, :, i, j] = sum(np.outer(w[:, channel, i, j], b_CK[channel]) for channel in range(6))
            affine[:, :, i, j] += w[:, pruned, i, j] @ b_PK
            constant += w[:, pruned, i, j] @ (mean[pruned] - b_PK @ mean[kept])
    for form, expected, bias_by_hand in (("gram", gram, bias.numpy()), ("affine", affine, constant)):
        result = recover_convolution(form, stats, weight.flatten(1), bias, torch.tensor(kept), ridge_rel=1e-5)
        np.testing.assert_allclose(result.weight_OK, expected.reshape(3, 27), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.bias_O, bias_by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ridge_rel", [0.0, 1e-5])
def test_im2col_is_least_squares_over_patches(ridge_rel: float, kind: str) -> None:
    """The pruned columns' contribution is regressed on the kept columns, centred; outputs are compared, not weights."""
    maps, (weight, bias) = hard_maps(kind), conv_of(3, 6, 3)
    u, kept = patches_by_hand(maps, 3, 1), torch.tensor([0, 1, 4])
    result = recover_convolution("im2col", statistics_of(maps, u), weight.flatten(1), bias, kept, ridge_rel=ridge_rel)
    a: Array = u.numpy() - u.numpy().mean(0)
    kept_k = [9 * channel + tap for channel in kept.tolist() for tap in range(9)]
    pruned_p = [column for column in range(54) if column not in kept_k]
    w: Array = weight.flatten(1).numpy()
    step = ridge_fit(a[:, kept_k], a[:, pruned_p] @ w[:, pruned_p].T, ridge_rel)
    given = u.numpy()[:, kept_k] @ result.weight_OK.numpy().T + result.bias_O.numpy()
    dense = u.numpy() @ w.T + bias.numpy()
    np.testing.assert_allclose(given, dense.mean(0) + a[:, kept_k] @ (w[:, kept_k] + step).T, rtol=1e-5, atol=1e-5)
    if ridge_rel == 0.0:
        best = min(
            recover_convolution(form, statistics_of(maps, u), weight.flatten(1), bias, kept, ridge_rel=0.0).residual
            for form in FORMS
        )
        assert result.residual <= best * (1.0 + 1e-9) + 1e-9


def rescaled(
    weight_OU: Tensor, bias_O: Tensor, mean_U: Tensor, covariance_UU: Tensor, mean_O: Tensor, variance_O: Tensor
) -> tuple[Tensor, Tensor]:
    """Rescale outputs of inputs with this mean and covariance to another mean and variance."""
    own = weight_OU @ mean_U + bias_O, ((weight_OU @ covariance_UU) * weight_OU).sum(dim=1).clamp_min(0.0)
    return rescale_outputs(weight_OU, bias_O, *own, mean_O, variance_O)


@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_outputs_have_dense_mean_and_variance(kind: str) -> None:
    maps, (weight, bias) = hard_maps(kind), conv_of(4, 6, 3)
    u, kept = patches_by_hand(maps, 3, 1), torch.tensor([0, 1, 4])
    stats, kept_k = statistics_of(maps, u), columns(kept, 9)
    small = recover_convolution("none", stats, weight.flatten(1), bias, kept, ridge_rel=0.0)
    dense = u @ weight.flatten(1).T + bias
    mean_k, covariance_kk = stats.mean_U[kept_k], stats.covariance_UU[kept_k[:, None], kept_k]
    mean_O, variance_O = dense.mean(dim=0), dense.var(dim=0, correction=0)
    new_Ok, new_O = rescaled(small.weight_OK, small.bias_O, mean_k, covariance_kk, mean_O, variance_O)
    outputs = u[:, kept_k] @ new_Ok.T + new_O
    torch.testing.assert_close(outputs.mean(dim=0), mean_O)
    torch.testing.assert_close(outputs.var(dim=0, correction=0), variance_O)
    assert not torch.allclose((u[:, kept_k] @ small.weight_OK.T).var(dim=0, correction=0), variance_O, rtol=1e-2)


def test_constant_output_keeps_its_weights_and_matches_the_mean() -> None:
    """Output 0 has no weights, output 1 reads a constant channel alone, and the variance wanted of output 2 is zero."""
    maps, (weight, bias) = hard_maps("dead"), conv_of(4, 6, 1)
    weight[0], weight[1] = 0.0, 0.0
    weight[1, 2] = 3.0  # a channel that is always on
    stats = statistics_of(maps, patches_by_hand(maps, 1, 0))
    mean_O = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    variance_O = torch.tensor([1.0, 1.0, 0.0, 9.0], dtype=torch.float64)
    new_OU, new_O = rescaled(weight.flatten(1), bias, stats.mean_U, stats.covariance_UU, mean_O, variance_O)
    assert torch.equal(new_OU[:2], weight.flatten(1)[:2])
    torch.testing.assert_close(new_OU @ stats.mean_U + new_O, mean_O)
    outputs = F.conv2d(maps, new_OU.view_as(weight), new_O).transpose(0, 1).flatten(1)
    expected = torch.tensor([0.0, 0.0, 0.0, 9.0], dtype=torch.float64)
    torch.testing.assert_close(outputs.var(dim=1, correction=0), expected, rtol=1e-9, atol=1e-12)


def test_constant_channel_is_not_constant_in_padded_patches() -> None:
    """Without padding a constant channel moves to the bias without loss; zeros of the padding make it vary."""
    maps, (weight, bias) = hard_maps("dead"), conv_of(4, 6, 3)
    kept = torch.tensor([0, 1, 4])
    for padding, lossless in ((0, True), (1, False)):
        stats = statistics_of(maps, patches_by_hand(maps, 3, padding))
        result = recover_convolution("bias", stats, weight.flatten(1), bias, kept, ridge_rel=0.0)
        assert (result.residual < 1e-12 * result.residual_uncompensated) == lossless
        eliminated = eliminate_blocks(stats.covariance_UU, weight.flatten(1), 9, ridge_rel=1e-6)
        assert (2 in eliminated.order_F[:3].tolist() and eliminated.error_at(3) < 1e-9) == lossless


def test_channel_scores_are_sums_over_columns() -> None:
    maps, (weight, _) = hard_maps("dead"), conv_of(3, 6, 3)
    u, flat = patches_by_hand(maps, 3, 1), weight.flatten(1)
    second_U = u.square().mean(dim=0)
    expected = {name: np.zeros(6) for name in ("energy", "magnitude", "combined", "wanda")}
    for channel in range(6):
        for i in range(3):
            for j in range(3):
                seen = float(u.view(-1, 6, 3, 3)[:, channel, i, j].square().mean())
                tap: Array = weight[:, channel, i, j].numpy()
                expected["energy"][channel] += seen
                expected["magnitude"][channel] += float(np.square(tap).sum())
                expected["combined"][channel] += seen * float(np.square(tap).sum()) ** 0.5
                expected["wanda"][channel] += seen**0.5 * float(np.abs(tap).sum())
    np.testing.assert_allclose(scores.energy(second_U, 9), expected["energy"], rtol=1e-12)
    np.testing.assert_allclose(scores.magnitude(flat, 9), expected["magnitude"] ** 0.5, rtol=1e-12)
    np.testing.assert_allclose(scores.combined(second_U, flat, 9), expected["combined"], rtol=1e-12)
    np.testing.assert_allclose(scores.wanda(second_U, flat, 9), expected["wanda"], rtol=1e-12)
    assert scores.wanda(second_U, flat, 9).argsort()[:2].sort().values.tolist() == [3, 5]
