"""The closed loops against least squares on raw samples, against the open loop, and the tokens that they fit."""

import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calib.images import Images
from calib.store import save_moments
from corp_deploy.algebra.regression import RegressionSums
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.correct import fit_corrections
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import counts_all, find_read_places
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.traced.finding.cuts import find_cuts
from corp_deploy.traced.models.steps import StreamState
from tests import tiny
from tests.command import invoked
from tests.doubles import some
from tests.test_traced_loops import Heard, layer_of


def opened(model: nn.Module, images: NDArray[np.float32]) -> Images:
    return tiny.opened(Path(tempfile.mkdtemp()) / "images.npy", images, model)


def best(**changes: Any) -> Method:
    return method_from_preset("best", **{"align_hidden": 8, "align_head": 8, **changes})


def node_values(
    model: nn.Module, images: NDArray[np.float32], read: slice
) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the values of the program's nodes as rows of tokens, and the names of its residual stream's nodes."""
    values = Heard(model).at(torch.from_numpy(images))
    rows = {name: each[:, read].flatten(0, 1).numpy() for name, each in values.items() if each.ndim == 3}
    return rows, [cut.node.name for cut in find_cuts(tracing(model).analysis)]


def input_node(model: nn.Module, layer: str) -> str:
    return layer_of(model, f"{layer}.weight").all_input_nodes[0].name


def ridge_toward(
    x: NDArray[Any], target: NDArray[Any], prior_OK: NDArray[Any], strength: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the weight and bias that lstsq finds from rows of data and rows that pull toward the prior's weight."""
    ridge = strength * x.var(axis=0).mean()
    rows = np.vstack(
        (np.hstack((x, np.ones((len(x), 1)))) / len(x) ** 0.5, ridge**0.5 * np.eye(x.shape[1], x.shape[1] + 1))
    )
    solved = np.linalg.lstsq(rows, np.vstack((target / len(x) ** 0.5, ridge**0.5 * prior_OK.T)), rcond=None)[0].T
    return solved[:, :-1], solved[:, -1]


@pytest.mark.parametrize(
    ("strength", "kwargs"),
    [(0.1, {}), (0.1, {"global_pool": "avg"}), (1e-3, {"global_pool": "avg", "init_values": 0.5})],
)
def test_closed_loop_of_one_block_equals_least_squares(strength: float, kwargs: dict[str, Any]) -> None:
    """Attention loses values first, so that the MLP also has to make up for an error from before it."""
    model: Any = tiny.checkpoint(depth=1, **kwargs).model
    images = tiny.images(24).repeat(4, axis=0)  # the held-out images repeat the fitted ones, so the fit is always taken
    scale = np.linspace(0.2, 0.9, 48) if "init_values" in kwargs else np.ones(48)
    if "init_values" in kwargs:
        model.blocks[0].ls2.gamma.detach().copy_(torch.from_numpy(scale))
    source, attention = opened(model, images), best(attention_sparsity=0.5, geometry="square")
    loop = Loop(strengths=(strength,), align_inputs=False)
    both = best(attention_sparsity=0.5, mlp_sparsity=0.5, geometry="square")
    looped = reduce_traced(model, source, both, loop=loop)
    assert [site.loop.strength for site in looped.sites if site.loop] == [strength] * 2
    # The prior is fc2 as recovered in the same model; a fit of this strength never helps and leaves fc2 alone.
    first = reduce_traced(model, source, attention, loop=loop).model
    never = Loop(strengths=(1e12,), align_inputs=False)
    prior = reduce_traced(first, source, best(mlp_sparsity=0.5), loop=never).model
    read = slice(1) if model.global_pool == "token" else slice(1, None)  # the tokens read after the last block
    (own, streams), (dense, dense_streams) = (node_values(each, images, read) for each in (prior, model))
    x, target = own[input_node(prior, "blocks.0.mlp.fc2")], dense[dense_streams[-1]] - own[streams[-2]]
    as_recovered = prior.state_dict()["blocks.0.mlp.fc2.weight"].numpy()
    weight, bias = ridge_toward(x, target, scale[:, None] * as_recovered, strength)
    found = looped.model.state_dict()
    np.testing.assert_allclose(found["blocks.0.mlp.fc2.weight"], weight / scale[:, None], rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found["blocks.0.mlp.fc2.bias"], bias / scale, rtol=2e-3, atol=2e-4)
    assert np.abs(found["blocks.0.mlp.fc2.weight"].numpy() - as_recovered).max() > 0.01


@pytest.mark.parametrize("name", ["blocks.1.mlp.fc1", "blocks.1.attn.qkv"])
@pytest.mark.parametrize("kwargs", [{}, {"qkv_bias": False}])
def test_first_layer_is_aligned_by_least_squares(name: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    """The layer keeps its full width, so that only the alignment changes it; a bias that it gains is saved."""
    dense, strength = tiny.checkpoint(global_pool="avg", **kwargs), 0.1
    model = dense.model
    images = tiny.images(24).repeat(4, axis=0)
    full = {"blocks.1.mlp": 192} if "mlp" in name else {"blocks.1.attn.qk": 48, "blocks.1.attn.v": 48}
    looped = reduce_traced(
        model, opened(model, images), best(), widths={"blocks.0.mlp": 48, **full}, loop=Loop(strengths=(strength,))
    )
    assert [site.alignment.strength for site in looped.sites if site.alignment] == [strength]
    read = slice(1, None) if "mlp" in name else slice(None)  # the average reads patches only, attention all tokens
    state, found = model.state_dict(), looped.model.state_dict()
    weight, bias = state[f"{name}.weight"].numpy(), state[f"{name}.bias"].numpy() if f"{name}.bias" in state else 0.0
    (own, _), (whole, _) = (node_values(each, images, read) for each in (looped.model, model))
    x, target = own[input_node(looped.model, name)], whole[input_node(model, name)] @ weight.T + bias
    solved = ridge_toward(x, target, weight, strength)
    expected = x @ solved[0].T + solved[1]
    mine = x @ found[f"{name}.weight"].double().numpy().T + found[f"{name}.bias"].double().numpy()
    assert np.abs(expected - target).mean() > 1e-3  # there is something to align
    np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-3)
    save(Checkpoint(model=looped.model, architecture=dense.architecture, lineage={}), tmp_path)
    assert torch.equal(tiny.ran(load_checkpoint(tmp_path).model, images), tiny.ran(looped.model, images))


def test_closed_loop_gains_more_on_random_weights_and_reports_its_loss() -> None:
    """Channels of random weights hardly explain each other, so every block loses much."""
    checkpoint, held_out = tiny.checkpoint(depth=3), tiny.images(64, seed=9)
    method = best(mlp_sparsity=0.5, attention_sparsity=0.5, geometry="square")
    source = opened(checkpoint.model, tiny.images(128))
    open_loop = reduce(checkpoint.model, calibrate(checkpoint, source, batch_size=32), method)
    looped = reduce_traced(checkpoint.model, source, method, loop=Loop())
    dense = tiny.ran(checkpoint.model, held_out)
    errors = [tiny.relative(tiny.ran(each.model, held_out), dense) for each in (looped, open_loop)]
    assert errors[0] < 0.9 * errors[1]
    assert not any(site.loop for site in open_loop.sites)
    for site in looped.sites:
        if site.loop is not None:
            assert site.loop.error <= site.loop.error_recovered * (1 + 1e-9)
            assert site.loop.error_held_out <= site.loop.error_recovered_held_out
            assert site.loop.error_held_out < some(site.loop.energy)
        if site.alignment is not None:
            assert site.alignment.error_held_out <= site.alignment.error_recovered_held_out
    assert looped.as_json()["sites"][-1]["loop"]["energy"] > 0.0


def sums_of(x_BNK: Tensor, t_BNO: Tensor) -> RegressionSums:
    sums = RegressionSums.empty(inputs=x_BNK.shape[-1], outputs=t_BNO.shape[-1])
    sums.add(x_BNK, t_BNO)
    return sums


PLANTED_OK = torch.randn(3, 5, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def planted(seed: int, *, noise: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 9, 5, generator=generator, dtype=torch.float64) + 1.0
    return x, x @ PLANTED_OK.T + 2.0 + noise * torch.randn(6, 9, 3, generator=generator, dtype=torch.float64)


def test_sums_equal_float64_means_and_add_up() -> None:
    """The samples lie on a coarse grid, where every float32 product and sum is exact."""
    (x, t), (y, u) = ([(16 * each).round() / 16 for each in planted(seed, noise=1.0)] for seed in (0, 1))
    regression = sums_of(x, t).with_those_of(sums_of(y, u)).regression()
    xs, ts = torch.cat((x, y)).flatten(0, 1), torch.cat((t, u)).flatten(0, 1)
    torch.testing.assert_close(regression.second_KK, xs.T @ xs / len(xs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression.cross_OK, ts.T @ xs / len(xs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression.mean_K, xs.mean(dim=0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression.mean_O, ts.mean(dim=0), rtol=1e-12, atol=1e-12)
    assert regression.target_square == pytest.approx(float(ts.square().sum(dim=1).mean()), rel=1e-12)
    assert regression.second_KK.dtype == torch.float64


def test_noise_is_not_fitted_and_a_linear_map_is() -> None:
    (x, clear), (y, other) = planted(0, noise=1e-6), planted(1, noise=1e-6)
    strengths = (1e-9, 1.0, 1e6)
    ((weight_CK, _),), fit = fit_corrections([(sums_of(x, clear), sums_of(y, other))], 1.0, strengths)
    assert fit.strength == 1e-9
    torch.testing.assert_close(weight_CK, PLANTED_OK, rtol=1e-4, atol=1e-4)
    noise_x, noise_t = planted(2, noise=0.0)[0], torch.randn(6, 9, 3, dtype=torch.float64)
    noise_t -= noise_t.mean(dim=(0, 1))
    ((nothing_CK, _),), fit = fit_corrections([(sums_of(noise_x, noise_t), sums_of(y, -noise_t))], 1.0, strengths)
    assert fit.strength in (None, 1e6)
    assert float(nothing_CK.abs().max()) < 1e-4


def test_zero_layer_scale_is_handled() -> None:
    model, images = tiny.checkpoint(init_values=0.5).model, tiny.images(16)
    with torch.no_grad():
        model.blocks[0].ls2.gamma.zero_()  # type: ignore[index, union-attr]
        model.blocks[1].ls1.gamma[:7] = 0.0  # type: ignore[index, union-attr]
    reduction = reduce_traced(model, opened(model, images), best(mlp_sparsity=0.5, attention_sparsity=0.5), loop=Loop())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in reduction.model.state_dict().values())
    assert tiny.relative(tiny.ran(reduction.model, images), tiny.ran(model, images)) < 0.5


def test_unreduced_sites_are_passed_through(tmp_path: Path) -> None:
    checkpoint = tiny.checkpoint(qk_norm=True, proj_bias=False)
    images = tiny.images(16)
    source = opened(checkpoint.model, images)
    reduction = reduce_traced(checkpoint.model, source, best(mlp_sparsity=0.5, attention_sparsity=0.5), loop=Loop())
    assert {site.part for site in reduction.sites} == {"mlp"}
    before, after = checkpoint.model.state_dict(), reduction.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if ".attn." in name)
    save(Checkpoint(model=reduction.model, architecture=checkpoint.architecture, lineage={}), tmp_path)
    torch.testing.assert_close(tiny.ran(load_checkpoint(tmp_path).model, images), tiny.ran(reduction.model, images))


@pytest.mark.parametrize(("preset", "geometry"), [("best", "padded"), ("best", "square"), ("corp", "padded")])
def test_every_geometry_and_preset_runs_in_a_closed_loop(preset: str, geometry: Any) -> None:
    model = tiny.checkpoint(qkv_bias=False).model
    half: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    method = method_from_preset(preset, geometry=geometry, **half)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counted: list[tuple[int, int]] = []
    reduction = reduce_traced(
        model, opened(model, tiny.images(16)), method, on_progress=lambda *told: counted.append(told), loop=Loop()
    )
    values = 24 if geometry == "square" else 48
    count = 4 + 2 * (geometry == "square")
    assert counted == [(finished, count) for finished in range(1, count + 1)]
    widths = {site.name.removeprefix("blocks."): site.width for site in sites_of(reduction.model).every}
    assert widths == {
        f"{at}.{name}": width for at in (0, 1) for name, width in (("attn.qk", 24), ("attn.v", values), ("mlp", 96))
    }
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in reduction.model.modules())


# The symmetric closed loop against a computation by hand, site by site, on float64 activations.

RIDGE = 1e-3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("symmetric") / "images.npy", tiny.images(24, seed=4))


def layer_input(model: nn.Module, name: str) -> Any:
    """Return the input of a layer as float64 rows, a row for each token of each image."""
    entering, _ = tiny.module_io(model, name, torch.from_numpy(tiny.images(24, seed=4)).double())
    return entering.flatten(0, 1).numpy()


def test_grail_preset_equals_the_papers_loop(images: Images) -> None:
    """By hand, for each MLP in turn: the Gram of the model so far, structured Wanda, W G_:S (G_SS + ridge I)^-1."""
    by_hand: Any = copy.deepcopy(tiny.checkpoint().model).double().eval()
    for index, block in enumerate(by_hand.blocks):
        x = layer_input(by_hand, f"blocks.{index}.mlp.fc2")
        second = block.mlp.fc2.weight.detach().numpy()
        gram: Any = sum(np.outer(row, row) for row in x) / len(x)
        score = np.abs(second).sum(0) * np.sqrt(np.diag(gram))
        kept = sorted(np.argsort(-score, kind="stable")[:96].tolist())
        inside = gram[np.ix_(kept, kept)]
        new = second @ gram[:, kept] @ np.linalg.inv(inside + RIDGE * np.diag(inside).mean() * np.eye(96))
        block.mlp.fc1.weight = nn.Parameter(block.mlp.fc1.weight[kept])
        block.mlp.fc1.bias = nn.Parameter(block.mlp.fc1.bias[kept])
        block.mlp.fc2.weight = nn.Parameter(torch.from_numpy(new))
    method = method_from_preset("grail", mlp_sparsity=0.5, align_hidden=8, ridge_rel=RIDGE)
    reduction = reduce_traced(tiny.checkpoint().model, images, method)
    others = torch.from_numpy(tiny.images(6, seed=9))
    with torch.inference_mode():
        expected, found = by_hand(others.double()), reduction.model(others)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert [site.loop for site in reduction.sites] == [None, None]
    assert "each to its dense weights" in reduction.decisions[0]
    # The open loop gives another second MLP, so the comparison can tell the two apart.
    moments = calibrate(tiny.checkpoint(), images, batch_size=8)
    with torch.inference_mode():
        alone = reduce(tiny.checkpoint().model, moments, method).model(others)
    assert float((alone - expected).norm() / expected.norm()) > 1e-3


@pytest.mark.parametrize("preset", ["best", "corp-v1", "fold"])
def test_every_method_runs_in_a_closed_loop(images: Images, preset: str) -> None:
    method = method_from_preset(preset, mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)
    sites = sites_of(reduce_traced(tiny.checkpoint().model, images, method).model).by_name
    pairs = 48 if "fold" in preset else 24
    assert {(sites[f"blocks.{at}.mlp"].width, sites[f"blocks.{at}.attn.qk"].width) for at in (0, 1)} == {(96, pairs)}


def test_command_accepts_both_loops(images: Images, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    np.save(tmp_path / "images.npy", tiny.images(24, seed=4))
    save_moments(calibrate(tiny.checkpoint(), images, batch_size=8), tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "--mlp", 0.5]
    words += ["--images", tmp_path / "images.npy", "--align", "mlp=8"]
    for option, message, fitted in (
        (("--closed-loop", "symmetric"), "in which they run, each to its dense weights", False),
        (("--closed-loop",), "in which they run, fitted to", True),
    ):
        assert message in " ".join(invoked(*words, *option, "-o", tmp_path / "r").stdout.split())
        lineage = json.loads((tmp_path / "r" / "config.json").read_text())["lineage"]
        assert (lineage["reduction"]["sites"][0]["loop"] is not None) == fitted
    held_out = invoked(*words, "--closed-loop", "symmetric", "--held-out", "h.safetensors", "-o", "r", code=2)
    assert "which held-out moments are not of" in held_out.stderr


# The last block of a closed loop is fitted to the tokens that the outputs depend on.

PLAIN, DISTILLED = tiny.ARCHITECTURE.name, "deit_tiny_distilled_patch16_224"
MODELS: dict[str, tuple[str, dict[str, Any], Sequence[int]]] = {
    "class token": (PLAIN, {}, [0]),
    "distilled": (DISTILLED, {}, [0, 1]),
    "registers": (PLAIN, {"reg_tokens": 4}, [0]),
    "average": (PLAIN, {"global_pool": "avg"}, range(1, 17)),
    "maximum": (PLAIN, {"global_pool": "max"}, range(1, 17)),
    "attention pool": (PLAIN, {"global_pool": "map", "class_token": False}, range(16)),
    "no classifier": (PLAIN, {"num_classes": 0}, [0]),
    "tokens": (PLAIN, {"num_classes": 0, "global_pool": ""}, range(17)),
}


def model_of(name: str, **changes: Any) -> nn.Module:
    model = tiny.timm_model(name, **{**tiny.ARCHITECTURE.kwargs, **changes})
    tiny.enliven(model, 0)
    return model


def outputs_with_random_token(model: nn.Module, token: int | None) -> Tensor:
    """Return the outputs for a few images if one token after the last block is replaced by a random one."""

    def shift(_: nn.Module, __: tuple[Tensor, ...], out_BNC: Tensor) -> Tensor:
        other_BNC = out_BNC.clone()
        if token is not None:
            other_BNC[:, token] = 5.0 * torch.randn(out_BNC[:, token].shape, generator=torch.Generator().manual_seed(1))
        return other_BNC

    handle = tiny.last_block(model).register_forward_hook(shift)
    with torch.inference_mode():
        outputs: Tensor = model(torch.from_numpy(tiny.images(4)))
    handle.remove()
    return outputs


@pytest.mark.parametrize("kind", MODELS)
def test_fit_uses_the_tokens_that_affect_the_outputs(kind: str) -> None:
    """By default a backbone is fitted to all tokens, any other model to those that its outputs read."""
    name, changes, expected = MODELS[kind]
    model = model_of(name, **changes)
    count, unchanged = len(traced_model.token_kinds(model)), outputs_with_random_token(model, None)
    needed = [token for token in range(count) if not torch.equal(outputs_with_random_token(model, token), unchanged)]
    places = find_read_places(tracing(model), torch.device("cpu"))
    read = {str(node.all_input_nodes[1].target): each.nonzero().flatten().tolist() for node, each in places.items()}
    assert needed == list(expected)
    assert read.get("blocks.1.mlp.fc2.weight", list(range(count))) == needed
    assert counts_all(model, "all")
    assert not counts_all(model, "pooled")
    assert counts_all(model, None) == (changes.get("num_classes") == 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_model_with_constant_outputs_is_fitted_to_all_tokens() -> None:
    model = model_of(PLAIN)
    with torch.no_grad():
        model.get_parameter("head.weight").zero_()
    assert not find_read_places(tracing(model), torch.device("cpu"))


def features(model: nn.Module) -> Tensor:
    """Return the residual stream after the last block."""
    images = torch.from_numpy(tiny.images(64, seed=9))
    with torch.inference_mode():
        walk = StreamState.of(traced_model.first_stream(model, images), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
    return walk.tokens.x.double()


HALF = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)


def test_fitting_patch_tokens_of_a_backbone_reduces_their_error(tmp_path: Path) -> None:
    model = model_of(PLAIN, num_classes=0, reg_tokens=2)
    images, dense, errors = tiny.opened(tmp_path / "images.npy", tiny.images(96), model), features(model), {}
    for reads in ("all", "pooled"):
        reduction = reduce_traced(model, images, HALF, loop=Loop(reads=reads))
        assert any("only places that outputs read" in said for said in reduction.decisions) == (reads == "pooled")
        found = features(reduction.model)
        errors[reads] = tiny.relative(found[:, 1:], dense[:, 1:]), tiny.relative(found[:, :1], dense[:, :1])
    assert errors["all"][0] < 0.98 * errors["pooled"][0]
    assert errors["pooled"][1] < errors["all"][1]


def test_command_reports_and_records_the_fitted_tokens(tmp_path: Path) -> None:
    tiny.written(tmp_path, 8)
    where = ["--model", tmp_path / "dense", "--images", tmp_path / "images.npy"]
    invoked("calibrate", *where, "-o", tmp_path / "m.safetensors")
    words = [*where, "--moments", tmp_path / "m.safetensors", "--mlp", "0.5", "--align", "mlp=8", "--closed-loop"]
    for reads, is_said in ((["--reads", "all"], False), ([], True)):
        result = invoked("reduce", *words, *reads, "-o", tmp_path / "reduced")
        lineage = json.loads((tmp_path / "reduced" / "config.json").read_text())["lineage"]
        decided = " ".join(lineage["reduction"]["decided"])
        assert ("only places that outputs read count in the fits of blocks.1" in decided) == is_said
        assert ("only places that outputs read" in " ".join(result.stdout.split())) == is_said
