"""Merged heads: the loss said is that of the shipped attention, refitting loses less, copies cost nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.inputs import held_out_split
from calib.moments import Moments
from calib.store import save as save_moments
from corp_deploy.algebra.fold import cluster_rows
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import load_checkpoint, save
from ground.errors import BadInput
from tests import tiny
from tests.command import invoked
from tests.small_models import error
from tests.test_corp_folded import both, images, linear, losses, pixels_of
from tests.test_corp_whole_heads import HELD_OUT, planted

__all__ = ["both", "images"]
HALF = {"heads_sparsity": 1 / 3}


def attention(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Spelled out, in float64, with as many heads of 16 as the layer has."""
    q, k, v = linear(model, f"{name}.qkv", x).unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4)
    z = (q @ k.mT / 4.0).softmax(-1) @ v
    return linear(model, f"{name}.proj", z.transpose(1, 2).flatten(2))


def folded(preset: str, both: tuple[Moments, Moments], images: Images, **changes: Any) -> Reduction:
    method = method_from_preset(preset, **HALF, **changes)
    return reduce(tiny.checkpoint().model, both[0], method, held_out=both[1], images=images)


@pytest.mark.parametrize("preset", ["grail-fold", "fold", "none"])
def test_the_loss_is_that_of_the_shipped_attention(both: tuple[Moments, Moments], images: Images, preset: str) -> None:
    reduction = folded(preset, both, images, heads_selection="fold")
    rest, held_out = held_out_split(images, 12, seed=0)
    dense = tiny.checkpoint().model
    fitted, judged = (losses(dense, reduction.model, pixels_of(part), attention, "attn") for part in (rest, held_out))
    for report in reduction.sites:
        assert (report.part, report.width) == ("heads", 2)
        name = report.site.removesuffix(".v")
        assert report.error == pytest.approx(fitted[name], rel=1e-4)
        assert report.held_out is not None
        assert report.held_out.error == pytest.approx(judged[name], rel=1e-4)
        assert report.error <= report.error_uncompensated * (1.0 + 1e-9)


def test_the_new_rows_are_the_means_of_clusters(both: tuple[Moments, Moments], images: Images) -> None:
    """Spelled out head by head, without a bias that the projection did not have."""
    name = "blocks.0.attn.qkv"
    dense, reduced = tiny.checkpoint().model, folded("fold", both, images).model
    weight, bias = dense.get_parameter(f"{name}.weight").detach(), dense.get_parameter(f"{name}.bias").detach()
    old, new = weight.view(3, 3, 16, -1), reduced.get_parameter(f"{name}.weight").detach().view(3, 2, 16, -1)
    rows = torch.cat([weight, bias.unsqueeze(1)], 1).double().view(3, 3, -1)
    cluster = cluster_rows(rows.transpose(0, 1).flatten(1), 2, seed=0)
    for part in range(3):
        for own in range(2):
            members = [head for head in range(3) if int(cluster[head]) == own]
            torch.testing.assert_close(new[part, own], old[part, members].mean(0))


def test_fitted_to_what_it_gives_it_loses_less_than_as_published(both: tuple[Moments, Moments], images: Images) -> None:
    errors = [sum(site.error for site in folded(name, both, images).sites) for name in ("fold", "grail-fold")]
    assert errors[0] < errors[1]
    with_mlp = folded("fold", both, images, mlp_sparsity=0.5)
    assert sorted(site.part for site in with_mlp.sites) == ["heads", "heads", "mlp", "mlp"]


@pytest.mark.parametrize("loop", ["open", "asymmetric", "symmetric"])
@pytest.mark.parametrize("preset", ["fold", "grail-fold"])
def test_copies_are_merged_for_nothing(preset: str, loop: str, tmp_path: Path) -> None:
    dense = planted()
    source = tiny.opened(tmp_path / "images.npy", tiny.images(32), dense.model)
    asked = method_from_preset(preset, heads_sparsity=0.5, ridge_rel=1e-9)
    if loop == "open":
        reduction = reduce(dense.model, calibrate(dense, source, batch_size=16), asked, images=source)
    else:
        reduction = reduce_traced(dense.model, source, asked, loop=Loop() if loop == "asymmetric" else None)
    assert error(reduction.model, dense.model, HELD_OUT) < 1e-4


def test_what_cannot_be_merged_is_told(both: tuple[Moments, Moments], tmp_path: Path) -> None:
    asked = method_from_preset("fold", **HALF)
    with pytest.raises(BadInput, match="merged channels and heads are fitted to"):
        reduce(tiny.checkpoint().model, both[0], asked)
    with pytest.raises(ValueError, match="leave --attn out"):
        method_from_preset("best", heads_selection="fold", heads_sparsity=0.5, attention_sparsity=0.5)
    with pytest.raises(ValueError, match="takes no whole heads away"):
        method_from_preset("vbp", heads_sparsity=0.5)


def test_the_command_folds_heads(both: tuple[Moments, Moments], images: Images, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    save_moments(both[0], tmp_path / "moments.safetensors")
    np.save(tmp_path / "images.npy", tiny.images(40, seed=1))
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "moments.safetensors"]
    words += ["--images", tmp_path / "images.npy", "--whole-heads", "0.34", "--select", "heads=fold"]
    invoked(*words, "-o", tmp_path / "reduced")
    loaded = load_checkpoint(tmp_path / "reduced").model
    assert {len(rows) for name, rows in loaded.named_parameters() if "qkv" in name} == {3 * 2 * 16}
    expected = reduce(
        tiny.checkpoint().model, both[0], method_from_preset("best", **HALF, heads_selection="fold"), images=images
    ).model
    assert error(loaded, expected, HELD_OUT) < 1e-6
