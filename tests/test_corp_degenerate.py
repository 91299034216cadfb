"""Degenerate models and images: results stay finite, and reported losses equal explicit float64 sums."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from tests import tiny

IMAGES = tiny.images(6)
ONE_IMAGE = np.repeat(IMAGES[:1], 6, axis=0)
PRESETS = ("corp", "grail", "best", "none")


def unchanged(_: nn.Module) -> None: ...


def scaled(factor: float, step: int = 1) -> Callable[[Any], None]:
    """Return an edit that scales every `step`th hidden activation and keeps the outputs, since ReLU is homogeneous."""

    def edit(block: Any) -> None:
        block.mlp.act = nn.ReLU()
        for parameter in (block.mlp.fc1.weight, block.mlp.fc1.bias):
            parameter[::step] *= factor
        block.mlp.fc2.weight[:, ::step] /= factor

    return edit


def constant(value: float) -> Callable[[Any], None]:
    """Return an edit that makes the input of GELU constant in every other hidden channel."""

    def edit(block: Any) -> None:
        block.mlp.fc1.weight[::2], block.mlp.fc1.bias[::2] = 0.0, value

    return edit


def twins(noise: float) -> Callable[[Any], None]:
    """Return an edit that makes every other hidden channel a copy of the one before it, up to noise."""

    def edit(block: Any) -> None:
        weight, bias = block.mlp.fc1.weight, block.mlp.fc1.bias
        weight[1::2], bias[1::2] = weight[::2] + noise * torch.randn_like(weight[::2]), bias[::2]

    return edit


def silent(*parts: int) -> Callable[[Any], None]:
    """Return an edit that sets queries (0), keys (1) or values (2) to zero."""

    def edit(block: Any) -> None:
        width = block.attn.qkv.weight.shape[1]
        for part in parts:
            block.attn.qkv.weight[part * width : (part + 1) * width] = 0.0
            block.attn.qkv.bias[part * width : (part + 1) * width] = 0.0

    return edit


def lopsided(block: Any) -> None:
    """Scale queries by 1e6 and keys by 1e-6, which leaves the logits as they are."""
    width = block.attn.qkv.weight.shape[1]
    for parameter in (block.attn.qkv.weight, block.attn.qkv.bias):
        parameter[:width] *= 1e6
        parameter[width : 2 * width] /= 1e6


@dataclass(frozen=True)
class Case:
    """An edited model and its images; in a `redundant` one half of the hidden channels follow from the others."""

    edit: Callable[[Any], None] = unchanged
    images: Any = field(default_factory=lambda: IMAGES)
    shape: tuple[tuple[str, Any], ...] = ()
    redundant: bool = False


CASES = {
    "dead channels": Case(constant(0.0), redundant=True),
    "constant channels": Case(constant(1.5), redundant=True),
    "twins": Case(twins(0.0), redundant=True),
    "near twins": Case(twins(1e-6), redundant=True),
    "activations of 1e6": Case(scaled(1e6)),
    "activations of 1e-8": Case(scaled(1e-8)),
    "both beside each other": Case(scaled(1e6, step=2)),
    "no queries": Case(silent(0)),
    "no attention": Case(silent(0, 1, 2)),
    "lopsided logits": Case(lopsided),
    "one image": Case(images=IMAGES[:1]),
    "one image again and again": Case(images=ONE_IMAGE),
    "nothing on the images": Case(images=np.zeros_like(IMAGES)),
    "one token": Case(shape=(("patch_size", 32), ("class_token", False), ("global_pool", "avg"))),
    "heads of 8": Case(shape=(("num_heads", 6),)),
    "heads of 64": Case(shape=(("num_heads", 1), ("embed_dim", 64))),
}


Reduced = tuple[Case, Any, Tensor, dict[str, Reduction]]


@pytest.fixture(scope="module", params=CASES)
def reduced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reduced:
    """Return a case, its dense model and images, and its reductions by preset."""
    case = CASES[request.param]
    dense = tiny.checkpoint(depth=1, **dict(case.shape))
    torch.manual_seed(0)
    with torch.no_grad():
        case.edit(next(dense.model.get_submodule("blocks").children()))
    images = tiny.opened(tmp_path_factory.mktemp("images") / "images.npy", case.images, dense.model)
    moments = calibrate(dense, images, batch_size=4, statistics=Statistics(attention_system=True))
    half = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 1, "align_head": 1}
    by_preset = {preset: reduce(dense.model, moments, method_from_preset(preset, **half)) for preset in PRESETS}
    return case, dense.model, torch.from_numpy(case.images), by_preset


@torch.no_grad()
def mean_squares(reduced: Reduced, preset: str) -> tuple[float, float, float]:
    """Return mean squares over tokens, in float64, of the first MLP's change, of its centred output and its output."""
    _, dense, images, by_preset = reduced
    # The inputs of the first MLP are the dense ones in every preset.
    x_BTD = tiny.module_io(dense, "blocks.0.mlp", images)[0].double()

    def output_of(model: nn.Module) -> Tensor:
        (one, one_bias), (two, two_bias) = (
            [model.get_parameter(f"blocks.0.mlp.{layer}.{part}").double() for part in ("weight", "bias")]
            for layer in ("fc1", "fc2")
        )
        return F.linear(dense.blocks[0].mlp.act(F.linear(x_BTD, one, one_bias)), two, two_bias)

    before, after = output_of(dense), output_of(by_preset[preset].model)
    centred = before - before.mean(dim=(0, 1))
    error, energy, whole = (float(each.square().sum(-1).mean()) for each in (after - before, centred, before))
    return error, energy, whole


@pytest.mark.parametrize("preset", PRESETS)
def test_degenerate_sites_give_finite_and_true_reports(reduced: Reduced, preset: str) -> None:
    case, _, images, by_preset = reduced
    result = by_preset[preset]
    assert all(bool(torch.isfinite(each).all()) for each in result.model.state_dict().values())
    assert bool(torch.isfinite(tiny.ran(result.model, images)).all())
    assert all(np.isfinite([site.error, site.energy, site.condition, site.ridge]).all() for site in result.sites)
    report = next(site for site in result.sites if site.site == "blocks.0.mlp")
    error, energy, whole = mean_squares(reduced, preset)
    # Weights and inputs are float32, whose rounding the report does not count as a loss.
    assert report.error == pytest.approx(error, rel=1e-3, abs=1e-6 * whole)
    assert report.energy == pytest.approx(energy, rel=1e-6, abs=1e-9)
    if case.redundant and preset == "best":
        assert error <= 1e-4 * energy
    if preset != "grail":  # its ridge also shrinks kept channels, so that it may lose more than no repair
        for site in result.sites:
            assert site.error <= site.error_uncompensated * (1 + 1e-9) + 1e-9 * site.energy


def test_ridge_is_never_raised_silently(reduced: Reduced) -> None:
    """The ridge is the method's share of the mean variance of the kept channels, however singular the covariance."""
    _, dense, images, by_preset = reduced
    result, first = by_preset["corp"], dense.blocks[0].mlp.fc1
    report = next(site for site in result.sites if site.site == "blocks.0.mlp")
    x_XF = tiny.module_io(dense, "blocks.0.mlp.act", images)[1].double().flatten(0, 1)
    rows, biases = (result.model.get_parameter(f"blocks.0.mlp.fc1.{part}") for part in ("weight", "bias"))
    kept = [
        int((first.weight - row).abs().sum(1).add((first.bias - bias).abs()).argmin())
        for row, bias in zip(rows, biases, strict=True)
    ]
    variance = float((x_XF[:, kept] - x_XF[:, kept].mean(0)).square().mean())
    assert report.ridge == pytest.approx(result.method.ridge_rel * variance, rel=1e-4, abs=1e-12 * report.energy)
