"""Models and images that numbers break on: everything stays finite, and what a site is said to lose is what it loses.

The first block's MLP is held against explicit sums in float64: its inputs are the dense ones in every preset.
"""

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
PRESETS = ("corp", "grail", "best")


def as_it_is(_: nn.Module) -> None: ...


def scaled(factor: float, step: int = 1) -> Callable[[Any], None]:
    """Hidden activations of this size at the same outputs, as ReLU lets through what a scale is."""

    def edit(block: Any) -> None:
        block.mlp.act = nn.ReLU()
        for parameter in (block.mlp.fc1.weight, block.mlp.fc1.bias):
            parameter[::step] *= factor
        block.mlp.fc2.weight[:, ::step] /= factor

    return edit


def flat(value: float) -> Callable[[Any], None]:
    """Every other hidden channel answers the same to everything."""

    def edit(block: Any) -> None:
        block.mlp.fc1.weight[::2], block.mlp.fc1.bias[::2] = 0.0, value

    return edit


def twins(noise: float) -> Callable[[Any], None]:
    """Every other hidden channel says what the one before it says, but for noise."""

    def edit(block: Any) -> None:
        weight, bias = block.mlp.fc1.weight, block.mlp.fc1.bias
        weight[1::2], bias[1::2] = weight[::2] + noise * torch.randn_like(weight[::2]), bias[::2]

    return edit


def silent(*parts: int) -> Callable[[Any], None]:
    """Queries (0), keys (1) or values (2) are zero."""

    def edit(block: Any) -> None:
        width = block.attn.qkv.weight.shape[1]
        for part in parts:
            block.attn.qkv.weight[part * width : (part + 1) * width] = 0.0
            block.attn.qkv.bias[part * width : (part + 1) * width] = 0.0

    return edit


def lopsided(block: Any) -> None:
    """Queries of 1e6 and keys of 1e-6: the same logits."""
    width = block.attn.qkv.weight.shape[1]
    for parameter in (block.attn.qkv.weight, block.attn.qkv.bias):
        parameter[:width] *= 1e6
        parameter[width : 2 * width] /= 1e6


@dataclass(frozen=True)
class Case:
    """`spare`: half of the hidden channels say nothing of their own, so that `best` loses nothing."""

    edit: Callable[[Any], None] = as_it_is
    images: Any = field(default_factory=lambda: IMAGES)
    shape: tuple[tuple[str, Any], ...] = ()
    spare: bool = False


CASES = {
    "dead channels": Case(flat(0.0), spare=True),
    "constant channels": Case(flat(1.5), spare=True),
    "twins": Case(twins(0.0), spare=True),
    "near twins": Case(twins(1e-6), spare=True),
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


Made = tuple[Case, Any, Tensor, dict[str, Reduction]]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    case = CASES[request.param]
    dense = tiny.checkpoint(depth=1, **dict(case.shape))
    torch.manual_seed(0)
    with torch.no_grad():
        case.edit(next(dense.model.get_submodule("blocks").children()))
    images = tiny.opened(tmp_path_factory.mktemp("images") / "images.npy", case.images, dense.model)
    moments = calibrate(dense, images, batch_size=4, statistics=Statistics(attention_system=True))
    ways = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 1, "align_head": 1}
    by_preset = {
        preset: reduce(dense.model, moments, method_from_preset(preset, **ways)) for preset in ("none", *PRESETS)
    }
    return case, dense.model, torch.from_numpy(case.images), by_preset


@torch.no_grad()
def lost(made: Made, preset: str) -> tuple[float, float, float]:
    """Mean squares over tokens, in float64: of what the first MLP's output changed by, of that output's spread, and of
    the output.
    """
    _, dense, images, by_preset = made
    entering, mlp = list[Tensor](), dense.blocks[0].mlp
    handle = mlp.register_forward_hook(lambda _, inputs, __: entering.append(inputs[0].double()))
    dense(images)
    handle.remove()
    x_BTD = torch.cat(entering)

    def given(model: nn.Module) -> Tensor:
        (one, one_bias), (two, two_bias) = (
            [model.get_parameter(f"blocks.0.mlp.{layer}.{part}").double() for part in ("weight", "bias")]
            for layer in ("fc1", "fc2")
        )
        return F.linear(mlp.act(F.linear(x_BTD, one, one_bias)), two, two_bias)

    before, after = given(dense), given(by_preset[preset].model)
    spread = before - before.mean(dim=(0, 1))
    error, about, whole = (float(each.square().sum(-1).mean()) for each in (after - before, spread, before))
    return error, about, whole


@pytest.mark.parametrize("preset", PRESETS)
def test_degenerate_sites_give_finite_and_true_reports(made: Made, preset: str) -> None:
    case, _, images, by_preset = made
    result = by_preset[preset]
    assert all(bool(torch.isfinite(each).all()) for each in result.model.state_dict().values())
    with torch.no_grad():
        answers = result.model(images)
    assert bool(torch.isfinite(answers).all())
    assert all(np.isfinite([site.error, site.energy, site.condition, site.ridge]).all() for site in result.sites)
    told = next(site for site in result.sites if site.site == "blocks.0.mlp")
    error, spread, whole = lost(made, preset)
    # Weights are held and inputs were seen in float32: what that rounds away of the output is no loss of the site's.
    assert told.error == pytest.approx(error, rel=1e-3, abs=1e-6 * whole)
    assert told.energy == pytest.approx(spread, rel=1e-6, abs=1e-9)
    if case.spare and preset == "best":
        assert error <= 1e-4 * spread
    if preset != "grail":  # of the widths that it chose itself, since the rankings are not the same
        for site in result.sites:
            assert site.error <= site.error_uncompensated * (1 + 1e-9) + 1e-9 * site.energy


def test_ridge_is_never_raised_silently(made: Made) -> None:
    """It is the share that the method names of the mean variance of the channels kept, whatever the covariance is."""
    _, dense, images, by_preset = made
    result = by_preset["corp"]
    told = next(site for site in result.sites if site.site == "blocks.0.mlp")
    hidden: list[Tensor] = []
    mlp = dense.blocks[0].mlp
    handle = mlp.act.register_forward_hook(lambda _, __, output: hidden.append(output.double()))
    with torch.no_grad():
        dense(images)
    handle.remove()
    x_XF = torch.cat(hidden).flatten(0, 1)
    rows, biases = (result.model.get_parameter(f"blocks.0.mlp.fc1.{part}") for part in ("weight", "bias"))
    kept = [
        int((mlp.fc1.weight - row).abs().sum(1).add((mlp.fc1.bias - bias).abs()).argmin())
        for row, bias in zip(rows, biases, strict=True)
    ]
    variance = float((x_XF[:, kept] - x_XF[:, kept].mean(0)).square().mean())
    assert told.ridge == pytest.approx(result.method.ridge_rel * variance, rel=1e-4, abs=1e-12 * told.energy)
