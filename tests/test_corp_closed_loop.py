"""The closed loop against the models' own activations, least squares on raw samples, and the open loop."""

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calib.collect import collect
from calib.images import Images
from corp_deploy.algebra.regression_sums import RegressionSums
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.modules import replaced
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import HeadWidths
from corp_deploy.reduction.branch_sums import dense_advanced
from corp_deploy.reduction.closed_loop import Loop, reduce_closed_loop
from corp_deploy.reduction.correct import correction
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.streams import Streams
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.inputs import lineage_for_moments
from examples.digits.images import load
from ground.errors import BadInput
from tests import tiny

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits" / "model"


def opened(model: nn.Module, images: NDArray[np.float32]) -> Images:
    return tiny.opened(Path(tempfile.mkdtemp()) / "images.npy", images, model)


def logits(model: nn.Module, images: NDArray[np.float32]) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.from_numpy(images))
    return out


def relative_error(candidate: Tensor, reference: Tensor) -> float:
    return float((candidate.double() - reference.double()).norm() / reference.double().norm())


def best(**changes: Any) -> Method:
    return method_from_preset("best", **{"align_hidden": 8, "align_head": 8, **changes})


def inputs_of_blocks(model: nn.Module, images: NDArray[np.float32]) -> list[Tensor]:
    """What enters each block, and what leaves the last one, by hooks on the model itself."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in model.blocks]  # type: ignore[union-attr]
    hooks.append(model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out)))  # type: ignore[union-attr, index]
    logits(model, images)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    "kwargs", [{}, {"init_values": 0.3, "drop_path_rate": 0.5}, {"qk_norm": True, "pre_norm": True}]
)
def test_the_streams_are_the_models_own_activations(kwargs: dict[str, Any]) -> None:
    model, images = tiny.checkpoint(**kwargs).model, tiny.images(6)
    expected = inputs_of_blocks(model, images)
    streams = Streams((vit.embedded(model, batch), None) for batch in opened(model, images).batches(4))
    found = [torch.cat([pair.dense for pair in streams])]
    with torch.no_grad():
        for step in vit.steps(model):
            assert isinstance(step, Branch)
            dense_advanced(step, streams)
            if step.name.endswith("mlp"):
                found.append(torch.cat([pair.dense for pair in streams]))
    assert len(found) == len(expected) == 3
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own)


def test_the_reduced_stream_is_the_reduced_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = tiny.checkpoint(init_values=0.4).model, tiny.images(12)
    kept: list[Streams] = []
    monkeypatch.setattr(
        "corp_deploy.reduction.streams.Streams",
        lambda *args, **kwargs: kept.append(Streams(*args, **kwargs)) or kept[-1],  # type: ignore[func-returns-value]
    )
    reduction = reduce_closed_loop(model, opened(model, images), best(mlp_sparsity=0.5, attention_sparsity=0.5))
    order = [0, 1, 2, 4, 5, 6, 8, 9, 10, 3, 7, 11]  # those held out stand apart
    found = [torch.cat([getattr(pair, which) for pair in kept[0]]) for which in ("reduced", "dense")]
    torch.testing.assert_close(found[0], inputs_of_blocks(reduction.model, images)[-1][order])
    torch.testing.assert_close(found[1], inputs_of_blocks(model, images)[-1][order])
    assert [pair.held_out for pair in kept[0]] == [False, True]
    classes = inputs_of_blocks(model, images)[-1][:, 0]
    assert reduction.sites[-1].loop is not None
    assert reduction.sites[-1].loop.energy == pytest.approx(float(classes.double().var(dim=0, correction=0).sum()))


@pytest.mark.parametrize("kwargs", [{}, {"init_values": 0.2}])
def test_with_nothing_removed_it_gives_back_the_dense_model(kwargs: dict[str, Any]) -> None:
    model, images = tiny.checkpoint(**kwargs).model, tiny.images(16)
    same: dict[str, int | HeadWidths] = {
        "blocks.0.attn": HeadWidths(qk=16, v=16),
        "blocks.0.mlp": 192,
        "blocks.1.attn": HeadWidths(qk=16, v=16),
        "blocks.1.mlp": 192,
    }
    reduction = reduce_closed_loop(model, opened(model, images), best(), widths=same)
    assert relative_error(logits(reduction.model, images), logits(model, images)) < 1e-5
    unasked = reduce_closed_loop(model, opened(model, images), best())
    assert unasked.sites == ()
    torch.testing.assert_close(logits(unasked.model, images), logits(model, images), rtol=0.0, atol=0.0)


def one_block_by_hand(
    dense: Any, prior: Any, images: NDArray[np.float32], strength: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """fc2 of a one-block model, by lstsq on raw samples: rows of data, and rows that pull toward the prior's weight."""
    after = inputs_of_blocks(copy.deepcopy(dense).double(), images.astype(np.float64))[-1]
    double = copy.deepcopy(prior).double()
    block = double.blocks[0]
    features: list[Tensor] = []
    block.mlp.fc2.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    between: list[Tensor] = []
    block.norm2.register_forward_pre_hook(lambda _, args: between.append(args[0]))
    logits(double, images.astype(np.float64))
    read = slice(1) if dense.global_pool == "token" else slice(1, None)  # nothing behind the last block reads the rest
    x, target = features[0][:, read].flatten(0, 1).numpy(), (after - between[0])[:, read].flatten(0, 1).numpy()
    weight = block.mlp.fc2.weight.detach().numpy()
    scale = block.ls2.gamma.detach().numpy() if hasattr(block.ls2, "gamma") else np.ones(len(weight))
    ridge = strength * x.var(axis=0).mean()
    rows = np.vstack(
        (np.hstack((x, np.ones((len(x), 1)))) / len(x) ** 0.5, ridge**0.5 * np.eye(x.shape[1], x.shape[1] + 1))
    )
    targets = np.vstack((target / len(x) ** 0.5, ridge**0.5 * (scale[:, None] * weight).T))
    solved = np.linalg.lstsq(rows, targets, rcond=None)[0].T / scale[:, None]
    return solved[:, :-1], solved[:, -1]


@pytest.mark.parametrize(
    ("strength", "kwargs"),
    [(0.1, {}), (0.1, {"global_pool": "avg"}), (1e-3, {"global_pool": "avg", "init_values": 0.5})],
)
def test_one_block_is_the_least_squares_answer(strength: float, kwargs: dict[str, Any]) -> None:
    """Attention loses values first, so the MLP has something to make up for that its own removal did not cause."""
    model: Any = tiny.checkpoint(depth=1, **kwargs).model
    images = tiny.images(24).repeat(4, axis=0)  # what is held out is what is fitted, so the fit is always taken
    scale = model.blocks[0].ls2
    if "init_values" in kwargs:
        scale.gamma.detach().copy_(torch.linspace(0.2, 0.9, 48))
    method = best(attention_sparsity=0.5, mlp_sparsity=0.5, geometry="square")
    source = opened(model, images)
    looped = reduce_closed_loop(model, source, method, loop=Loop(strengths=(strength,), align_inputs=False))
    assert [site.loop.strength for site in looped.sites if site.loop] == [strength, strength]
    # The prior: the same model with fc2 as recovered, which a fit that never helps leaves alone.
    attention = {"blocks.0.attn": looped.model.get_submodule("blocks.0.attn")}
    prior = reduce_closed_loop(
        replaced(model, attention), source, best(mlp_sparsity=0.5), loop=Loop(strengths=(1e12,), align_inputs=False)
    ).model
    weight, bias = one_block_by_hand(model, prior, images, strength)
    found = looped.model.state_dict()
    np.testing.assert_allclose(found["blocks.0.mlp.fc2.weight"], weight, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found["blocks.0.mlp.fc2.bias"], bias, rtol=2e-3, atol=2e-4)
    assert float((found["blocks.0.mlp.fc2.weight"] - prior.state_dict()["blocks.0.mlp.fc2.weight"]).abs().max()) > 0.01


def seen_by(model: nn.Module, name: str, images: NDArray[Any]) -> Tensor:
    """What a module gets, of every token, in float64."""
    double, caught = copy.deepcopy(model).double(), list[Tensor]()
    double.get_submodule(name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    logits(double, images.astype(np.float64))
    return caught[0]


@pytest.mark.parametrize("name", ["blocks.1.mlp.fc1", "blocks.1.attn.qkv"])
@pytest.mark.parametrize("kwargs", [{}, {"qkv_bias": False}])
def test_a_first_layer_is_aligned_by_least_squares(name: str, kwargs: dict[str, Any]) -> None:
    """At full width nothing else changes fc1; a fused qkv is aligned before its heads are mixed, so logits tell."""
    model, strength = tiny.checkpoint(global_pool="avg", **kwargs).model, 0.1
    images = tiny.images(24).repeat(4, axis=0)
    site = name.rpartition(".")[0]
    full: int | HeadWidths = 192 if site.endswith("mlp") else HeadWidths(qk=16, v=16)
    loop = Loop(strengths=(strength,))
    looped = reduce_closed_loop(
        model, opened(model, images), best(), widths={"blocks.0.mlp": 48, site: full}, loop=loop
    )
    assert [report.alignment.strength for report in looped.sites if report.alignment] == [None, strength]
    dense_first = model.get_submodule(name)
    weight = dense_first.weight.detach().double().numpy()  # type: ignore[operator]
    read = slice(1, None) if site.endswith("mlp") else slice(None)  # the average is over patches, but keys are of all
    x = seen_by(looped.model, name, images)[:, read].flatten(0, 1).numpy()
    target = seen_by(model, name, images)[:, read].flatten(0, 1).numpy() @ weight.T
    if dense_first.bias is not None:
        target += dense_first.bias.detach().double().numpy()  # type: ignore[operator]
    ridge = strength * x.var(axis=0).mean()
    rows = np.vstack(
        (np.hstack((x, np.ones((len(x), 1)))) / len(x) ** 0.5, ridge**0.5 * np.eye(x.shape[1], x.shape[1] + 1))
    )
    solved = np.linalg.lstsq(rows, np.vstack((target / len(x) ** 0.5, ridge**0.5 * weight.T)), rcond=None)[0].T
    found = looped.model.state_dict()
    expected = x @ solved[:, :-1].T + solved[:, -1]
    mine = x @ found[f"{name}.weight"].double().numpy().T + found[f"{name}.bias"].double().numpy()
    assert np.abs(expected - target).mean() > 1e-3  # there is something to align
    if site.endswith("mlp"):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-3)
        return
    heads = [each.reshape(len(x), 3, 3, 16) for each in (mine, expected)]
    for head in range(3):
        one, other = (each[:200, 0, head] @ each[:200, 1, head].T for each in heads)
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=5e-2)


def test_alignment_lowers_the_error_where_much_is_missing(tmp_path: Path) -> None:
    """And a bias that it makes comes back with the saved model."""
    checkpoint = tiny.checkpoint(depth=4, qkv_bias=False)
    source, held_out = opened(checkpoint.model, tiny.images(192)), tiny.images(64, seed=9)
    method = best(mlp_sparsity=0.5, attention_sparsity=0.5)
    dense = logits(checkpoint.model, held_out)
    aligned, plain = (
        reduce_closed_loop(checkpoint.model, source, method, loop=Loop(align_inputs=align)) for align in (True, False)
    )
    assert not any(site.alignment for site in plain.sites)
    errors = [relative_error(logits(each.model, held_out), dense) for each in (aligned, plain)]
    assert errors[0] < 0.99 * errors[1]
    save(Checkpoint(model=aligned.model, architecture=checkpoint.architecture, lineage={}), tmp_path)
    torch.testing.assert_close(logits(load_checkpoint(tmp_path).model, held_out), logits(aligned.model, held_out))


@cache
def example() -> Checkpoint:
    return load_checkpoint(EXAMPLE)


def both_loops(checkpoint: Checkpoint, images: NDArray[np.float32], method: Method) -> tuple[Reduction, Reduction]:
    """Open and closed, from the same images."""
    source, sites = opened(checkpoint.model, images), calibration_taps(checkpoint.model, vit.sites(checkpoint.model))
    lineage = lineage_for_moments(checkpoint, source)
    moments = collect(checkpoint.model, sites, source.batches(32), device="cpu", lineage=lineage)
    return reduce(checkpoint.model, moments, method), reduce_closed_loop(checkpoint.model, source, method)


@pytest.mark.slow("models")
def test_on_the_example_the_loop_lowers_the_held_out_error() -> None:
    held_out = load("held-out").images
    method = best(mlp_sparsity=0.75, attention_sparsity=0.75)
    open_loop, looped = both_loops(example(), load("train").images[:256], method)
    dense = logits(example().model, held_out)
    assert relative_error(logits(looped.model, held_out), dense) < 0.98 * relative_error(
        logits(open_loop.model, held_out), dense
    )
    assert sum(site.loop is not None for site in looped.sites) == 12


def test_without_redundancy_it_gains_more_and_tells_what_it_lost() -> None:
    """Random weights leave little to explain one channel by others, so much goes missing at every block."""
    checkpoint, held_out = tiny.checkpoint(depth=4), tiny.images(64, seed=9)
    method = best(mlp_sparsity=0.5, attention_sparsity=0.5, geometry="square")
    open_loop, looped = both_loops(checkpoint, tiny.images(192), method)
    dense = logits(checkpoint.model, held_out)
    assert relative_error(logits(looped.model, held_out), dense) < 0.9 * relative_error(
        logits(open_loop.model, held_out), dense
    )
    told = [{(site.site, site.part, site.width) for site in reduction.sites} for reduction in (looped, open_loop)]
    assert told[0] == told[1]
    assert not any(site.loop for site in open_loop.sites)
    for site in looped.sites:
        if site.loop is not None:
            assert site.loop.error <= site.loop.error_recovered * (1 + 1e-9)
            assert site.loop.error_held_out <= site.loop.error_recovered_held_out
            assert site.loop.energy is not None
            assert site.loop.error_held_out < site.loop.energy
        if site.alignment is not None:
            assert site.alignment.error_held_out <= site.alignment.error_recovered_held_out
    assert looped.as_json()["sites"][-1]["loop"]["energy"] > 0.0


def test_the_order_of_the_images_hardly_matters() -> None:
    model, images = tiny.checkpoint().model, tiny.images(64)
    method = best(mlp_sparsity=0.5, attention_sparsity=0.5)
    held_out = tiny.images(16, seed=5)
    dense = logits(model, held_out)
    one, other = (
        logits(reduce_closed_loop(model, opened(model, images[order]), method).model, held_out)
        for order in (slice(None), np.random.default_rng(3).permutation(64))
    )
    assert float((one - other).norm()) < 0.3 * float((one - dense).norm())


def sums_of(x_BNK: Tensor, t_BNO: Tensor) -> RegressionSums:
    sums = RegressionSums.empty(inputs=x_BNK.shape[-1], outputs=t_BNO.shape[-1])
    sums.add(x_BNK, t_BNO)
    return sums


def planted(seed: int, *, noise: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 9, 5, generator=generator, dtype=torch.float64) + 1.0
    truth = torch.randn(3, 5, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x, x @ truth.T + 2.0 + noise * torch.randn(6, 9, 3, generator=generator, dtype=torch.float64)


def test_sums_are_float64_means_of_the_samples_and_add_up() -> None:
    """On a coarse grid, where every float32 product and sum is exact."""
    (x, t), (y, u) = ([(16 * each).round() / 16 for each in planted(seed, noise=1.0)] for seed in (0, 1))
    regression = sums_of(x, t).with_those_of(sums_of(y, u)).regression()
    xs, ts = torch.cat((x, y)).flatten(0, 1), torch.cat((t, u)).flatten(0, 1)
    torch.testing.assert_close(regression.second_KK, xs.T @ xs / len(xs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression.cross_OK, ts.T @ xs / len(xs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression.mean_K, xs.mean(dim=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression.mean_O, ts.mean(dim=0), rtol=1e-12, atol=1e-12)
    assert regression.target_square == pytest.approx(float(ts.square().sum(dim=1).mean()), rel=1e-12)
    assert regression.second_KK.dtype == torch.float64


def test_noise_is_not_fitted_and_a_plain_map_is() -> None:
    (x, clear), (y, other) = planted(0, noise=1e-6), planted(1, noise=1e-6)
    strengths = (1e-9, 1.0, 1e6)
    found = correction(sums_of(x, clear), sums_of(y, other), None, 1.0, strengths)
    truth = torch.randn(3, 5, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    assert found.fit.strength == 1e-9
    torch.testing.assert_close(found.weight_CK, truth, rtol=1e-4, atol=1e-4)
    noise_x, noise_t = planted(2, noise=0.0)[0], torch.randn(6, 9, 3, dtype=torch.float64)
    noise_t -= noise_t.mean(dim=(0, 1))
    nothing = correction(sums_of(noise_x, noise_t), sums_of(y, -noise_t), None, 1.0, strengths)
    assert nothing.fit.strength in (None, 1e6)
    assert float(nothing.weight_CK.abs().max()) < 1e-4


def test_rows_that_the_layer_scale_silences_stay() -> None:
    (x, t), (y, u) = planted(0, noise=0.0), planted(1, noise=0.0)
    scale = torch.tensor([0.5, 0.0, 1e-9])
    plain = correction(sums_of(x, t), sums_of(y, u), None, 1.0, (1e-6,))
    found = correction(sums_of(x, t), sums_of(y, u), scale, 1.0, (1e-6,))
    torch.testing.assert_close(found.weight_CK[0], 2.0 * plain.weight_CK[0])
    torch.testing.assert_close(found.bias_C[0], 2.0 * plain.bias_C[0])
    assert not found.weight_CK[1:].any()
    assert not found.bias_C[1:].any()


def test_a_layer_scale_of_zero_does_no_harm() -> None:
    model, images = tiny.checkpoint(init_values=0.5).model, tiny.images(16)
    with torch.no_grad():
        model.blocks[0].ls2.gamma.zero_()  # type: ignore[index, union-attr]
        model.blocks[1].ls1.gamma[:7] = 0.0  # type: ignore[index, union-attr]
    reduction = reduce_closed_loop(model, opened(model, images), best(mlp_sparsity=0.5, attention_sparsity=0.5))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in reduction.model.state_dict().values())
    assert relative_error(logits(reduction.model, images), logits(model, images)) < 0.5


def test_sites_that_keep_their_width_are_walked_through(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint(qk_norm=True, proj_bias=False)
    images = tiny.images(16)
    source = opened(checkpoint.model, images)
    reduction = reduce_closed_loop(checkpoint.model, source, best(mlp_sparsity=0.5, attention_sparsity=0.5))
    assert {site.part for site in reduction.sites} == {"mlp"}
    assert len(reduction.notes) == 2
    before, after = checkpoint.model.state_dict(), reduction.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if ".attn." in name)
    save(Checkpoint(model=reduction.model, architecture=checkpoint.architecture, lineage={}), tmp_path)
    torch.testing.assert_close(logits(load_checkpoint(tmp_path).model, images), logits(reduction.model, images))


@pytest.mark.parametrize("geometry", ["padded", "square", "ragged"])
@pytest.mark.parametrize("preset", ["best", "corp"])
def test_every_geometry_and_preset_is_carried(preset: str, geometry: Any) -> None:
    checkpoint = tiny.checkpoint(qkv_bias=False)
    if preset == "corp" and geometry == "square":
        return
    method = method_from_preset(
        preset, mlp_sparsity=0.5, attention_sparsity=0.5, geometry=geometry, align_hidden=8, align_head=8
    )
    before = {name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()}
    counted: list[int] = []
    source = opened(checkpoint.model, tiny.images(16))
    reduction = reduce_closed_loop(checkpoint.model, source, method, done=counted.append)
    assert counted == [1, 2, 3, 4]
    widths = {(part.qk, part.v, part.geometry) for part in vit.sites(reduction.model).heads}
    assert widths == {(8, 8 if geometry == "square" else 16, geometry)}
    assert all(torch.equal(before[name], tensor) for name, tensor in checkpoint.model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in reduction.model.modules())


def test_an_unlabelled_block_of_another_kind_is_walked_whole() -> None:
    model = tiny.timm_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7
    )
    tiny.enliven(model, 0)

    class Other(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * 0.5
            return out

    model = replaced(model, {"blocks.0": Other(model.blocks[0])}).eval()  # type: ignore[index, arg-type]
    images = tiny.images(16)
    reduction = reduce_closed_loop(model, opened(model, images), best(mlp_sparsity=0.5, attention_sparsity=0.5))
    assert {site.site for site in reduction.sites} == {"blocks.1.attn", "blocks.1.mlp"}
    assert relative_error(logits(reduction.model, images), logits(model, images)) < 0.5


def test_too_few_images_are_refused() -> None:
    model = tiny.checkpoint().model
    with pytest.raises(BadInput, match="got 3 images, expected at least 4"):
        reduce_closed_loop(model, opened(model, tiny.images(3)), best(mlp_sparsity=0.5))
