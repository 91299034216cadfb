"""Reduction against the paper's formulas computed here in float64, image by image, and its refusals."""

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from calib.moments import Moments
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint
from corp_deploy.store.inputs import images_for_model
from examples.digits.images import load
from ground.errors import BadInput
from tests import tiny

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits" / "model"
Array = NDArray[np.float64]
RIDGE = 1e-4
HEADS = 3


@cache
def example() -> Checkpoint:
    return load_checkpoint(EXAMPLE)


def moments_of(
    checkpoint: Checkpoint, images: NDArray[np.float32], directory: Path, *, attention_system: bool = True
) -> Moments:
    np.save(directory / "images.npy", images)
    source = images_for_model(checkpoint.model, directory / "images.npy")
    return calibrate(checkpoint, source, batch_size=16, statistics=Statistics(attention_system=attention_system))


@pytest.fixture(scope="module")
def example_moments(tmp_path_factory: pytest.TempPathFactory) -> Moments:
    return moments_of(example(), load("train").images[:256], tmp_path_factory.mktemp("moments"))


# The paper in float64, written out: loops over images, numpy.kron, numpy.linalg.solve.


def blocks_in_float64(model: nn.Module, images: NDArray[np.float32]) -> list[dict[str, Array]]:
    """Per block: x [images, tokens, hidden] before fc2 and the qkv output [images, tokens, 3 * dim]."""
    seen: list[dict[str, Array]] = []
    double = copy.deepcopy(model).double()
    for block in double.blocks:  # type: ignore[union-attr]
        found: dict[str, Array] = {}
        seen.append(found)
        block.mlp.fc2.register_forward_pre_hook(lambda _, args, found=found: found.update(x=args[0].numpy()))
        block.attn.qkv.register_forward_hook(lambda _, __, out, found=found: found.update(qkv=out.numpy()))
    with torch.inference_mode():
        double(torch.from_numpy(images).double())
    return seen


def paper_mlp(x_NF: Array, weight_OF: Array, bias_O: Array, keep: int) -> tuple[list[int], Array, Array]:
    """Section 3.3's combined score, then equation 9 with the ridge relative to the mean diagonal of Sigma_SS."""
    score = (x_NF**2).mean(0) * np.linalg.norm(weight_OF, axis=0)
    kept = sorted(np.argsort(-score, kind="stable")[:keep].tolist())
    pruned = [i for i in range(x_NF.shape[1]) if i not in kept]
    mean = x_NF.mean(0)
    centred = x_NF - mean
    sigma = centred.T @ centred / len(x_NF)
    sigma_SS, sigma_PS = sigma[np.ix_(kept, kept)], sigma[np.ix_(pruned, kept)]
    b = sigma_PS @ np.linalg.inv(sigma_SS + RIDGE * np.diag(sigma_SS).mean() * np.eye(keep))
    c = mean[pruned] - b @ mean[kept]
    return kept, weight_OF[:, kept] + weight_OF[:, pruned] @ b, bias_O + weight_OF[:, pruned] @ c


def paper_head(q_BND: Array, k_BND: Array, keep: int) -> tuple[list[int], Array, Array]:
    """Score s_j, then equations 14 to 16 summed image by image; returns the kept dims and the two factors."""
    score = np.mean([(q**2).sum(0) * (k**2).sum(0) for q, k in zip(q_BND, k_BND, strict=True)], axis=0)
    kept = sorted(np.argsort(-score, kind="stable")[:keep].tolist())
    pruned = [i for i in range(q_BND.shape[2]) if i not in kept]
    gram, cross = np.zeros((keep**2, keep**2)), np.zeros(keep**2)
    for q, k in zip(q_BND, k_BND, strict=True):
        q_S, q_P, k_S, k_P = q[:, kept], q[:, pruned], k[:, kept], k[:, pruned]
        gram += np.kron(k_S.T @ k_S, q_S.T @ q_S)
        cross += ((q_S.T @ q_P) @ (k_P.T @ k_S)).flatten(order="F")
    ridge = RIDGE * np.diag(gram).mean()
    m = np.linalg.solve(gram + ridge * np.eye(keep**2), cross).reshape(keep, keep, order="F")
    u, s, vt = np.linalg.svd(np.eye(keep) + m)
    return kept, u * np.sqrt(s), vt.T * np.sqrt(s)


def paper_model(model: nn.Module, images: NDArray[np.float32], hidden: int, width: int) -> nn.Module:
    """The paper's reduced model in float64, with an attention of its own."""
    double = copy.deepcopy(model).double()
    for block, seen in zip(double.blocks, blocks_in_float64(model, images), strict=True):  # type: ignore[arg-type]
        mlp, attn = block.mlp, block.attn
        x_NF = seen["x"].reshape(-1, seen["x"].shape[-1])
        kept, weight, bias = paper_mlp(x_NF, mlp.fc2.weight.detach().numpy(), mlp.fc2.bias.detach().numpy(), hidden)
        mlp.fc1.weight = nn.Parameter(mlp.fc1.weight[kept])
        mlp.fc1.bias = nn.Parameter(mlp.fc1.bias[kept])
        mlp.fc2.weight, mlp.fc2.bias = nn.Parameter(torch.from_numpy(weight)), nn.Parameter(torch.from_numpy(bias))
        heads, dim = attn.num_heads, attn.head_dim
        shaped = seen["qkv"].reshape(*seen["qkv"].shape[:2], 3, heads, dim)
        maps = [paper_head(shaped[:, :, 0, h], shaped[:, :, 1, h], width) for h in range(heads)]
        block.attn = PaperAttention(attn, maps)
    return double


class PaperAttention(nn.Module):
    def __init__(self, dense: nn.Module, maps: list[tuple[list[int], Array, Array]]) -> None:
        super().__init__()
        self.dense, self.maps = dense, maps

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        dense = self.dense
        heads, dim = int(dense.num_heads), int(dense.head_dim)  # type: ignore[arg-type]
        q, k, v = dense.qkv(x).reshape(*x.shape[:2], 3, heads, dim).unbind(2)  # type: ignore[operator]
        out = []
        for h, (kept, q_factor, k_factor) in enumerate(self.maps):
            q_S = q[:, :, h, kept] @ torch.from_numpy(q_factor)
            k_S = k[:, :, h, kept] @ torch.from_numpy(k_factor)
            out.append(torch.softmax(q_S @ k_S.mT / dim**0.5, -1) @ v[:, :, h])
        return dense.proj(torch.cat(out, -1))  # type: ignore[operator, no-any-return]


@pytest.mark.slow("models")
def test_preset_corp_is_the_paper(tmp_path: Path) -> None:
    calibration, held_out = load("train").images[:64], load("held-out").images[:50]
    method = method_from_preset("corp", mlp_sparsity=0.5, attention_sparsity=0.5)
    reduced = reduce(example().model, moments_of(example(), calibration, tmp_path), method).model
    dense = dense_from_architecture(example().architecture)
    dense.load_state_dict(example().model.state_dict())
    expected = paper_model(dense, calibration, hidden=192, width=16)
    with torch.inference_mode():
        reference = expected(torch.from_numpy(held_out).double())
    assert tiny.relative(tiny.ran(reduced, held_out), reference) < 1e-4
    # The test can tell: without the compensation the same widths are far away.
    plain = method_from_preset("none", mlp_sparsity=0.5, attention_sparsity=0.5)
    without = reduce(example().model, moments_of(example(), calibration, tmp_path), plain).model
    assert tiny.relative(tiny.ran(without, held_out), reference) > 1e-2


@pytest.mark.slow("models")
@pytest.mark.parametrize("sparsity", [0.5, 0.75])
def test_best_loses_at_most_a_quarter_of_what_corp_loses(example_moments: Moments, sparsity: float) -> None:
    held_out = load("held-out").images
    dense = tiny.ran(example().model, held_out)
    error = {}
    for preset in ("best", "corp", "none"):
        method = method_from_preset(
            preset, mlp_sparsity=sparsity, attention_sparsity=sparsity, align_hidden=8, align_head=8
        )
        error[preset] = tiny.relative(tiny.ran(reduce(example().model, example_moments, method).model, held_out), dense)
    assert error["best"] <= 0.25 * error["corp"], error
    assert error["corp"] <= 0.25 * error["none"], error


@pytest.mark.slow("models")
def test_the_example_reaches_its_accuracy_and_best_keeps_it(example_moments: Moments) -> None:
    held_out = load("held-out")

    def accuracy(model: nn.Module) -> float:
        return float((tiny.ran(model, held_out.images).argmax(1).numpy() == held_out.labels).mean())

    assert accuracy(example().model) >= 0.97
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5)
    assert accuracy(reduce(example().model, example_moments, method).model) >= accuracy(example().model) - 0.01


def test_widths_are_aligned_and_both_are_told(example_moments: Moments) -> None:
    method = method_from_preset("best", mlp_sparsity=0.6, attention_sparsity=0.6)
    reduction = reduce(example().model, example_moments, method)
    mlp = next(site for site in reduction.sites if site.site == "blocks.2.mlp")
    head = next(site for site in reduction.sites if site.site == "blocks.2.attn.qk")
    assert (mlp.width_dense, round(mlp.width_asked, 1), mlp.width) == (384, 153.6, 128)
    assert (head.width_dense, round(head.width_asked, 1), head.width) == (32, 12.8, 16)
    kept = {
        site.name.rpartition("2.")[2]: site.width for site in sites_of(reduction.model).every if "s.2." in site.name
    }
    assert kept == {"attn.qk": 16 * HEADS, "attn.v": 32 * HEADS, "mlp": 128}


def test_every_site_tells_what_was_lost(example_moments: Moments) -> None:
    for preset in ("best", "corp"):
        method = method_from_preset(preset, mlp_sparsity=0.5, attention_sparsity=0.5)
        for site in reduce(example().model, example_moments, method).sites:
            assert 0.0 <= site.error < site.error_uncompensated, site
            assert 0.0 < site.r2 <= 1.0, site
            assert site.error < site.energy, site


def test_only_what_is_asked_is_reduced(example_moments: Moments) -> None:
    reduced = reduce(example().model, example_moments, method_from_preset("best", mlp_sparsity=0.5)).model
    assert {site.width for site in sites_of(reduced).every if ".attn." in site.name} == {32 * HEADS}
    before = {name: tensor.clone() for name, tensor in example().model.state_dict().items()}
    reduce(example().model, example_moments, method_from_preset("best", attention_sparsity=0.5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in example().model.state_dict().items())


def test_moments_of_another_model_are_refused(example_moments: Moments) -> None:
    with pytest.raises(BadInput, match="taken on another model"):
        reduce(tiny.checkpoint().model, example_moments, method_from_preset("best", mlp_sparsity=0.5))


def test_corp_without_the_attention_system_says_what_to_do(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint()
    moments = moments_of(checkpoint, tiny.images(8), tmp_path, attention_system=False)
    with pytest.raises(BadInput, match=r"blocks\.0\.attn\.qk: .* --attention-system"):
        reduce(checkpoint.model, moments, method_from_preset("corp", attention_sparsity=0.5))


def test_qk_norm_keeps_q_and_k_and_says_so(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint(qk_norm=True)
    moments = moments_of(checkpoint, tiny.images(8), tmp_path, attention_system=False)
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5)
    reduction = reduce(checkpoint.model, moments, method)
    assert list(reduction.coverage.refused) == ["blocks.0.attn.v", "blocks.1.attn.v"]
    assert {len(reduction.model.get_parameter(f"blocks.{at}.attn.qkv.weight")) for at in (0, 1)} == {3 * 48}


@pytest.mark.parametrize("bias", [True, False])
def test_a_missing_bias_is_made_when_the_repair_needs_one(tmp_path: Path, bias: bool) -> None:
    checkpoint = tiny.checkpoint(proj_bias=bias, qkv_bias=bias)
    moments = moments_of(checkpoint, tiny.images(8), tmp_path, attention_system=False)
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5)
    reduced = reduce(checkpoint.model, moments, method).model
    assert {"blocks.0.mlp.fc2.bias", "blocks.1.mlp.fc2.bias"} <= reduced.state_dict().keys()
    images = tiny.images(8)
    dense = tiny.ran(checkpoint.model, images)
    plain = method_from_preset("none", mlp_sparsity=0.5, attention_sparsity=0.5)
    assert tiny.relative(tiny.ran(reduced, images), dense) < tiny.relative(
        tiny.ran(reduce(checkpoint.model, moments, plain).model, images), dense
    )


@pytest.mark.parametrize(
    "bad", [{"mlp_sparsity": 1.0}, {"attention_sparsity": -0.1}, {"align_head": 0}, {"ridge_rel": 0.0}]
)
def test_impossible_choices_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"got|expected"):
        Method(mlp_selection="obs", mlp_recovery="affine", qk_recovery="lowrank", **bad)  # type: ignore[arg-type]
