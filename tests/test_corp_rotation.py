"""Rotation of reduced heads by Hadamard matrices: equal logits and outputs, and the options for it."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from calib.images import Images
from calib.moments import Moments
from corp_deploy.algebra.rotation import hadamard, is_rotatable, rotate_maps, rotate_weight
from corp_deploy.invocation.method_choice import MethodChoice
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import PRESETS, Method, method_from_preset
from corp_deploy.reduction.model import reduce
from tests import small_convnets, tiny
from tests.refusals import rejects
from tests.small_models import outputs

HELD_OUT = torch.from_numpy(tiny.images(6, seed=5))


@cache
def images(**kwargs: Any) -> Images:
    path = Path(small_convnets._FOLDER.name) / "rotation.npy"
    return tiny.opened(path, tiny.images(48), tiny.checkpoint(**kwargs).model)


@cache
def moments(**kwargs: Any) -> Moments:
    return calibrate(tiny.checkpoint(**kwargs), images(**kwargs), batch_size=16)


def method(**changes: Any) -> Method:
    return method_from_preset("best", attention_sparsity=0.5, align_head=8, **changes)


def spread(width: int, how: str) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(3, width, 12, generator=generator, dtype=torch.float64)
    if how == "ill-conditioned":
        rows *= 10.0 ** -torch.arange(width, dtype=torch.float64).unsqueeze(1)
    elif how == "singular":
        rows[:, 1:] = 0.0
    return rows


def test_rotation_is_sylvesters_hadamard_matrix() -> None:
    for width in (2, 4, 16, 64):
        signs = [[(-1.0) ** (row & column).bit_count() for column in range(width)] for row in range(width)]
        expected = torch.tensor(signs, dtype=torch.float64) / width**0.5
        torch.testing.assert_close(hadamard(width), expected, rtol=0.0, atol=0.0)
        torch.testing.assert_close(hadamard(width) @ hadamard(width).T, torch.eye(width, dtype=torch.float64))
    assert [width for width in range(20) if is_rotatable(width)] == [2, 4, 8, 16]


@pytest.mark.parametrize("how", ["random", "ill-conditioned", "singular"])
@pytest.mark.parametrize("width", [1, 6, 8])
def test_rotation_preserves_logits_and_outputs(width: int, how: str) -> None:
    """Heads are computed one by one; a width without a Hadamard matrix keeps its basis."""
    q_HRD, k_HRD, v_HRD = (spread(width, how) * scale for scale in (1.0, 2.0, -1.0))
    x_XD = torch.randn(20, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight_OK = torch.randn(5, 3 * width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rotated = rotate_weight(weight_OK, 3)
    for head in range(3):
        q, k, v, q2, k2, v2 = (
            x_XD @ each[head].T for maps in (lambda m: m, rotate_maps) for each in map(maps, (q_HRD, k_HRD, v_HRD))
        )
        own = slice(head * width, (head + 1) * width)
        torch.testing.assert_close(q2 @ k2.T, q @ k.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(v2 @ rotated[:, own].T, v @ weight_OK[:, own].T, rtol=1e-12, atol=1e-12)
        assert q2.equal(q) == (width != 8)
    assert rotated.equal(weight_OK) == (width != 8)


@pytest.mark.parametrize("geometry", ["padded", "square"])
def test_rotation_preserves_outputs_of_a_reduced_model(geometry: str) -> None:
    asked = method(geometry=geometry)
    plain = replace(asked, rotates=False)
    rotated, unrotated = (reduce(tiny.checkpoint().model, moments(), each) for each in (asked, plain))
    exact = outputs(unrotated.model, HELD_OUT)
    assert float((outputs(rotated.model, HELD_OUT) - exact).norm() / exact.norm()) < 1e-6
    assert rotated.sites == unrotated.sites
    first, second = (each.model.get_parameter("blocks.0.attn.qkv.weight") for each in (rotated, unrotated))
    changed = [not one.equal(two) for one, two in zip(first.split(24), second.split(24), strict=False)]
    values_too = geometry == "square"
    assert changed[:2] == [True, True]
    assert all(each == values_too for each in changed[2:])
    projections = (each.model.get_parameter("blocks.0.attn.proj.weight") for each in (rotated, unrotated))
    assert torch.equal(*projections) != values_too


def test_closed_loop_fits_the_rotated_basis() -> None:
    """The last layer is fitted behind the rotation, so the outputs equal those without a rotation."""
    asked = method(geometry="square", mlp_sparsity=0.5, align_hidden=8)
    models = [
        reduce_traced(tiny.checkpoint().model, images(), each, loop=Loop()).model
        for each in (asked, replace(asked, rotates=False))
    ]
    exact = outputs(models[1], HELD_OUT)
    assert float((outputs(models[0], HELD_OUT) - exact).norm() / exact.norm()) < 1e-4


@pytest.mark.parametrize("kwargs", [{"num_heads": 1}, {"qk_norm": True}])
def test_nothing_changes_without_a_free_rotation(kwargs: dict[str, Any]) -> None:
    """A width of 24 has no Hadamard matrix, and norms of queries and keys fix the basis."""
    models = [
        reduce(tiny.checkpoint(**kwargs).model, moments(**kwargs), each).model.state_dict()
        for each in (method(), replace(method(), rotates=False))
    ]
    assert all(models[0][name].equal(value) for name, value in models[1].items())


def test_rotating_presets_are_listed() -> None:
    assert [name for name, each in PRESETS.items() if each.rotates] == ["best"]
    assert MethodChoice(attn=0.5).method.rotates
    assert not MethodChoice(attn=0.5, rotate=False).method.rotates
    assert MethodChoice(attn=0.5, preset="corp", rotate=True).method.rotates
    rejects("--rotate has no effect on preset grail", ReduceOptions, preset="grail", mlp=0.5, rotate=True)
    message = "--no-rotate has no effect on a reduction that leaves attention alone"
    rejects(message, ReduceOptions, mlp=0.5, rotate=False)
