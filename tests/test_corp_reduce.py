"""Presets on images: errors of `best` and others, widths, biases and refusals."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn

from calib.moments import Moments
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from examples.digits.images import load_part
from tests import tiny
from tests.refusals import rejects

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits" / "model"
HEADS = 3


@cache
def example() -> Checkpoint:
    return load_checkpoint(EXAMPLE)


def moments_of(
    checkpoint: Checkpoint, images: NDArray[np.float32], directory: Path, *, attention_system: bool = True
) -> Moments:
    source = tiny.opened(directory / "images.npy", images, checkpoint.model)
    return calibrate(checkpoint, source, batch_size=16, statistics=Statistics(attention_system=attention_system))


@pytest.fixture(scope="module")
def example_moments(tmp_path_factory: pytest.TempPathFactory) -> Moments:
    return moments_of(example(), load_part("train").images[:256], tmp_path_factory.mktemp("moments"))


@pytest.mark.slow("models")
@pytest.mark.parametrize("sparsity", [0.5, 0.75])
def test_best_loses_at_most_a_quarter_of_what_corp_loses(example_moments: Moments, sparsity: float) -> None:
    held_out = load_part("held-out").images
    dense = tiny.ran(example().model, held_out)
    error = {}
    for preset in ("best", "corp", "none"):
        sizes = {"mlp_sparsity": sparsity, "attention_sparsity": sparsity, "align_hidden": 8, "align_head": 8}
        reduced = reduce(example().model, example_moments, method_from_preset(preset, **sizes)).model
        error[preset] = tiny.relative(tiny.ran(reduced, held_out), dense)
    assert error["best"] <= 0.25 * error["corp"], error
    assert error["corp"] <= 0.25 * error["none"], error


@pytest.mark.slow("models")
def test_example_reaches_its_accuracy_and_best_keeps_it(example_moments: Moments) -> None:
    held_out = load_part("held-out")

    def accuracy(model: nn.Module) -> float:
        return float((tiny.ran(model, held_out.images).argmax(1).numpy() == held_out.labels).mean())

    assert accuracy(example().model) >= 0.97
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5)
    assert accuracy(reduce(example().model, example_moments, method).model) >= accuracy(example().model) - 0.01


def test_aligned_and_requested_widths_are_reported(example_moments: Moments) -> None:
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


def test_corp_without_the_attention_system_explains_the_remedy(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint()
    moments = moments_of(checkpoint, tiny.images(8), tmp_path, attention_system=False)
    corp = method_from_preset("corp", attention_sparsity=0.5)
    rejects(r"blocks\.0\.attn\.qk: .* --attention-system", reduce, checkpoint.model, moments, corp)


@pytest.mark.parametrize("bias", [True, False])
def test_missing_bias_is_added_if_the_repair_needs_one(tmp_path: Path, bias: bool) -> None:
    checkpoint = tiny.checkpoint(proj_bias=bias, qkv_bias=bias)
    moments = moments_of(checkpoint, tiny.images(8), tmp_path, attention_system=False)
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5)
    reduced = reduce(checkpoint.model, moments, method).model
    assert {"blocks.0.mlp.fc2.bias", "blocks.1.mlp.fc2.bias"} <= reduced.state_dict().keys()
    images = tiny.images(8)
    dense = tiny.ran(checkpoint.model, images)
    method = method_from_preset("none", mlp_sparsity=0.5, attention_sparsity=0.5)
    plain = reduce(checkpoint.model, moments, method).model
    repaired_error, plain_error = (tiny.relative(tiny.ran(each, images), dense) for each in (reduced, plain))
    assert repaired_error < plain_error


@pytest.mark.parametrize(
    "bad", [{"mlp_sparsity": 1.0}, {"attention_sparsity": -0.1}, {"align_head": 0}, {"ridge_rel": 0.0}]
)
def test_impossible_choices_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"got|expected"):
        Method(mlp_selection="obs", mlp_recovery="affine", qk_recovery="lowrank", **bad)  # type: ignore[arg-type]
