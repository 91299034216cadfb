"""Merged channels and heads: reported losses, refitting, the clustering of rows, and refusals."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from calib.images import Images
from calib.inputs import held_out_split
from calib.moments import Moments
from calib.store import save_moments
from corp_deploy.algebra.fold import cluster_rows
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.recipe_file import load_recipe
from corp_deploy.release.stages import stages_of
from corp_deploy.store.checkpoint import Checkpoint, save
from tests import tiny
from tests.command import invoked, refuses
from tests.doubles import some
from tests.recipes import recipe
from tests.refusals import rejects
from tests.small_models import error
from tests.test_corp_whole_heads import HELD_OUT, planted


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("folded") / "images.npy", tiny.images(40, seed=1))


@pytest.fixture(scope="module")
def both(images: Images) -> tuple[Moments, Moments]:
    rest, held_out = held_out_split(images, 12, seed=0)
    return calibrate(tiny.checkpoint(), rest, batch_size=8), calibrate(tiny.checkpoint(), held_out, batch_size=8)


def doubled(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().eval()


def linear(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer of the model in float64."""
    weight, bias = (model.get_parameter(f"{name}.{each}").double() for each in ("weight", "bias"))
    return functional.linear(x, weight, bias)


def hidden(model: nn.Module, name: str, x: Tensor) -> Tensor:
    return functional.gelu(linear(model, f"{name}.fc1", x))


def mlp(model: nn.Module, name: str, x: Tensor) -> Tensor:
    return linear(model, f"{name}.fc2", hidden(model, name, x))


def attention(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Apply an attention layer with heads of 16, written out in float64."""
    q, k, v = linear(model, f"{name}.qkv", x).unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4)
    z = (q @ k.mT / 4.0).softmax(-1) @ v
    return linear(model, f"{name}.proj", z.transpose(1, 2).flatten(2))


HALF = {"heads_sparsity": 1 / 3}
Layer = Callable[[nn.Module, str, Tensor], Tensor]


@torch.inference_mode()
def losses(dense: nn.Module, reduced: nn.Module, pixels: Tensor, layer: Layer, part: str) -> dict[str, float]:
    """Return the mean squared change per token of each merged layer on the dense model's inputs, in float64."""
    found = {}
    for name in (f"blocks.{block}.{part}" for block in range(2)):
        entering, out = tiny.module_io(doubled(dense), name, pixels.double())
        found[name] = float((out - layer(reduced, name, entering)).flatten(0, 1).square().sum(1).mean())
    return found


def pixels_of(images: Images) -> Tensor:
    return torch.cat(list(images.batches(8)))


def folded(preset: str, both: tuple[Moments, Moments], images: Images, **options: Any) -> Reduction:
    method = method_from_preset(preset, **{"align_hidden": 8, **options})
    return reduce(tiny.checkpoint().model, both[0], method, held_out=both[1], images=images)


@pytest.mark.parametrize(
    ("part", "layer", "preset", "options"),
    [
        ("mlp", mlp, "grail-fold", {"mlp_sparsity": 0.75}),
        ("mlp", mlp, "fold", {"mlp_sparsity": 0.3}),
        ("attn", attention, "grail-fold", HALF),
        ("attn", attention, "fold", HALF),
        ("attn", attention, "none", HALF),
    ],
)
def test_reported_loss_equals_that_of_the_merged_layer(
    both: tuple[Moments, Moments], images: Images, part: str, layer: Layer, preset: str, options: dict[str, Any]
) -> None:
    reduction = folded(preset, both, images, **options, **({"heads_selection": "fold"} if part == "attn" else {}))
    parts, dense = held_out_split(images, 12, seed=0), tiny.checkpoint().model
    fit, others = (losses(dense, reduction.model, pixels_of(each), layer, part) for each in parts)
    assert [site.site.removesuffix(".v") for site in reduction.sites] == list(fit)
    for site in reduction.sites:
        assert site.part == {"mlp": "mlp", "attn": "heads"}[part]
        assert site.error == pytest.approx(fit[site.site.removesuffix(".v")], rel=1e-4)
        assert some(site.held_out).error == pytest.approx(others[site.site.removesuffix(".v")], rel=1e-4)
        assert 0.0 < site.error <= site.error_uncompensated * (1.0 + 1e-9)
        assert site.error < site.energy or preset == "none"
    assert reduction.notes == ()


def test_refit_is_ridge_regression_toward_plain_folding(both: tuple[Moments, Moments], images: Images) -> None:
    """The expected weights come from lstsq on the merged layer's own float64 activations, with a free bias."""
    whole, small = doubled(tiny.checkpoint().model), folded("fold", both, images, mlp_sparsity=0.5).model
    rest = pixels_of(held_out_split(images, 12, seed=0)[0])
    name = "blocks.1.mlp"
    with torch.inference_mode():
        entering, out = tiny.module_io(whole, name, rest.double())
        z, y = (each.flatten(0, 1).numpy() for each in (hidden(small, name, entering), out))
    rows = np.asarray(whole.get_parameter(f"{name}.fc1.weight").detach())
    means = np.asarray(small.get_parameter(f"{name}.fc1.weight").detach().double())
    second = np.asarray(whole.get_parameter(f"{name}.fc2.weight").detach())
    cluster = cluster_rows(torch.from_numpy(rows), 96, seed=0).numpy()
    np.testing.assert_allclose(means, [rows[cluster == each].mean(0) for each in range(96)], atol=1e-6)
    plain = np.stack([second[:, cluster == each].sum(1) for each in range(96)], axis=1)
    centred, centred_y = z - z.mean(0), y - y.mean(0)
    ridge = 1e-4 * np.square(centred).mean(0).mean()
    system = np.vstack((centred / len(z) ** 0.5, ridge**0.5 * np.eye(96)))
    targets = np.vstack((centred_y / len(z) ** 0.5, ridge**0.5 * plain.T))
    fitted = np.linalg.lstsq(system, targets, rcond=None)[0].T
    expected = centred @ fitted.T + y.mean(0)
    with torch.inference_mode():
        found = linear(small, f"{name}.fc2", torch.from_numpy(z))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def with_duplicates(checkpoint: Checkpoint) -> Checkpoint:
    """Make every second hidden channel of every MLP a copy of the one before it."""
    with torch.no_grad():
        for name, rows in checkpoint.model.named_parameters():
            if "mlp.fc1" in name:
                rows[1::2] = rows[::2]
    return checkpoint


@pytest.mark.parametrize(("preset", "ridge_rel"), [("fold", 1e-4), ("grail-fold", 1e-12)])
def test_planted_duplicates_are_merged_without_loss(images: Images, preset: str, ridge_rel: float) -> None:
    checkpoint = with_duplicates(tiny.checkpoint())
    moments = calibrate(checkpoint, images, batch_size=8)
    method = method_from_preset(preset, mlp_sparsity=0.5, align_hidden=8, ridge_rel=ridge_rel)
    for site in reduce(checkpoint.model, moments, method, images=images).sites:
        assert site.width == 96
        assert max(site.error, site.error_uncompensated) < 1e-9 * site.energy


@pytest.mark.parametrize("preset", ["grail-fold", "fold"])
def test_closed_loop_judges_on_its_own_stream(images: Images, preset: str) -> None:
    """The first reduced site reads the dense stream, so that its loss is the open loop's."""
    model, moments = tiny.checkpoint().model, calibrate(tiny.checkpoint(), images, batch_size=8)
    method, widths = method_from_preset(preset), {"blocks.0.mlp": 96, "blocks.1.mlp": 96}
    loop = Loop(align_inputs=False)
    looped = reduce_traced(model, images, method, widths=widths, loop=loop).sites
    alone = reduce(model, moments, method, widths=widths, images=images).sites
    assert looped[0].error == pytest.approx(alone[0].error, rel=1e-4)
    assert looped[0].error_uncompensated == pytest.approx(alone[0].error_uncompensated, rel=1e-4)
    assert looped[1].error != pytest.approx(alone[1].error, rel=1e-3)
    assert all(site.loop is not None and site.loop.error <= site.loop.error_recovered for site in looped)


def test_unsuitable_images_are_refused(both: tuple[Moments, Moments], images: Images, tmp_path: Path) -> None:
    dense, method = tiny.checkpoint().model, method_from_preset("fold", mlp_sparsity=0.5, align_hidden=8)
    rejects("give them: --images", reduce, dense, both[0], method)
    strangers = tiny.opened(tmp_path / "other.npy", tiny.images(9, seed=8))
    rejects("none of these 9 images is a calibration one", reduce, dense, both[0], method, images=strangers)
    rest, _ = held_out_split(images, 12, seed=0)
    rejects("none of these 28 images is a held-out one", reduce, dense, both[0], method, held_out=both[1], images=rest)


def test_fewer_images_than_the_moments_give_a_warning(both: tuple[Moments, Moments], images: Images) -> None:
    few, _ = held_out_split(held_out_split(images, 12, seed=0)[0], 20, seed=0)
    method = method_from_preset("grail-fold", mlp_sparsity=0.5, align_hidden=8)
    (note,) = reduce(tiny.checkpoint().model, both[0], method, images=few).notes
    assert "on 8 of the 28 calibration images" in note


def test_command_needs_images_and_reports_on_both_sets(
    both: tuple[Moments, Moments], images: Images, tmp_path: Path
) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    np.save(tmp_path / "images.npy", tiny.images(40, seed=1))
    save_moments(both[0], tmp_path / "m.safetensors")
    save_moments(both[1], tmp_path / "h.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "-o", tmp_path / "r"]
    words += ["--held-out", tmp_path / "h.safetensors", "--mlp", 0.5, "--preset", "grail-fold", "--align", "mlp=8"]
    refuses("presets that merge channels (grail-fold, fold)", *words)
    assert not (tmp_path / "r").exists()
    assert "held out" in invoked(*words, "--images", tmp_path / "images.npy").stdout


def test_recipe_merges_by_its_calibration_images(tmp_path: Path) -> None:
    model = {"model": {"model": "deit_small_patch16_224"}}
    for preset, needs_images in (("grail", False), ("grail-fold", True), ("fold", True)):
        (tmp_path / "recipe.toml").write_text(recipe(model | {"reduce": {"mlp": 0.5, "preset": preset}}))
        loaded = load_recipe(tmp_path / "recipe.toml")
        assert loaded.reduce.needs_images == needs_images
        commands = {stage.name: stage.command for stage in stages_of(loaded, tmp_path, Baseline())}
        assert ("--images" in commands["reduce"]) == needs_images


def test_merged_rows_are_cluster_means(both: tuple[Moments, Moments], images: Images) -> None:
    name = "blocks.0.attn.qkv"
    dense, reduced = tiny.checkpoint().model, folded("fold", both, images, **HALF).model
    weight, bias = dense.get_parameter(f"{name}.weight").detach(), dense.get_parameter(f"{name}.bias").detach()
    old, new = weight.view(3, 3, 16, -1), reduced.get_parameter(f"{name}.weight").detach().view(3, 2, 16, -1)
    rows = torch.cat([weight, bias.unsqueeze(1)], 1).double().view(3, 3, -1)
    cluster = cluster_rows(rows.transpose(0, 1).flatten(1), 2, seed=0)
    for part in range(3):
        for own in range(2):
            members = [head for head in range(3) if int(cluster[head]) == own]
            torch.testing.assert_close(new[part, own], old[part, members].mean(0))


def test_refitted_merging_loses_less_than_the_published_one(both: tuple[Moments, Moments], images: Images) -> None:
    errors = [sum(site.error for site in folded(name, both, images, **HALF).sites) for name in ("fold", "grail-fold")]
    assert errors[0] < errors[1]
    with_mlp = folded("fold", both, images, **HALF, mlp_sparsity=0.5)
    assert sorted(site.part for site in with_mlp.sites) == ["heads", "heads", "mlp", "mlp"]


@pytest.mark.parametrize(
    ("preset", "loop"), [("fold", "open"), ("grail-fold", "open"), ("fold", "asymmetric"), ("grail-fold", "symmetric")]
)
def test_copies_are_merged_without_loss(preset: str, loop: str, tmp_path: Path) -> None:
    dense = planted()
    source = tiny.opened(tmp_path / "images.npy", tiny.images(32), dense.model)
    method = method_from_preset(preset, heads_sparsity=0.5, ridge_rel=1e-9)
    if loop == "open":
        reduction = reduce(dense.model, calibrate(dense, source, batch_size=16), method, images=source)
    else:
        reduction = reduce_traced(dense.model, source, method, loop=Loop() if loop == "asymmetric" else None)
    assert error(reduction.model, dense.model, HELD_OUT) < 1e-4


def test_unmergeable_sites_are_reported() -> None:
    with pytest.raises(ValueError, match="leave --attn out"):
        method_from_preset("best", heads_selection="fold", heads_sparsity=0.5, attention_sparsity=0.5)
    with pytest.raises(ValueError, match="takes no whole heads away"):
        method_from_preset("vbp", heads_sparsity=0.5)


# The clustering of rows


def test_planted_clusters_are_found_and_ordered() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 10.0 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    truth = torch.tensor([0, 1, 0, 2, 3, 1, 2, 2, 3, 0])
    rows = centres[truth] + 0.01 * torch.randn(10, 6, generator=generator, dtype=torch.float64)
    for seed in range(5):
        assert cluster_rows(rows, 4, seed=seed).tolist() == truth.tolist()


@given(seed=st.integers(0, 10_000), width=st.integers(1, 12), doubles=st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_every_row_joins_its_nearest_centre_and_no_cluster_is_empty(seed: int, width: int, doubles: int) -> None:
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[:doubles] = rows[0]
    rows[:, 2] = 1.0  # a column that does not vary
    cluster = cluster_rows(rows, width, seed=seed)
    assert cluster.bincount(minlength=width).min() > 0
    assert cluster.numel() == 12
    assert torch.equal(cluster, cluster_rows(rows, width, seed=seed))
    if doubles <= 12 - width:  # enough distinct rows that nothing had to be forced apart
        deviation = rows.std(dim=0, correction=0)
        scaled = (rows - rows.mean(dim=0)) / torch.where(deviation > 0, deviation, 1.0)
        centres = torch.stack([scaled[cluster == c].mean(dim=0) for c in range(width)])
        own = (scaled - centres[cluster]).square().sum(dim=1)
        nearest = torch.cdist(scaled, centres).square().min(dim=1).values
        assert bool((own <= nearest + 1e-9).all())
