"""Presets compared with their papers' equations, solved by numpy on float64 activations."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calib.images import Images
from calib.moments import Moments
from calib.store import save_moments
from corp_deploy.algebra.fold import cluster_rows
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import PRESETS, Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from tests import tiny
from tests.command import invoked, refuses
from tests.test_corp_folded import linear, mlp

Array = NDArray[np.floating[Any]]
RIDGE = 1e-3
COUNT, HIDDEN, HEADS, DIM, WIDTH = 24, 96, 3, 16, 8
SITES = ("blocks.0.mlp", "blocks.1.mlp")


@cache
def dense() -> Any:
    """Return the tiny model in float64."""
    return copy.deepcopy(tiny.checkpoint().model).double().eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("published") / "images.npy", tiny.images(COUNT))


@pytest.fixture(scope="module")
def moments(images: Images) -> Moments:
    return calibrate(tiny.checkpoint(), images, batch_size=8, statistics=Statistics(attention_system=True))


@cache
def recorded(name: str, what: str, count: int, seed: int = 0) -> Array:
    """Record a dense module's input or output on these images in float64, [images, tokens, channels]."""
    caught: dict[str, Tensor] = {}
    module = dense().get_submodule(name)
    handle = module.register_forward_hook(lambda _, args, out: caught.update({"input": args[0], "output": out}))
    with torch.inference_mode():
        dense()(torch.from_numpy(tiny.images(count, seed)).double())
    handle.remove()
    found: Array = caught[what].numpy()
    return found


def layer(name: str) -> tuple[Array, Array]:
    linear: nn.Linear = dense().get_submodule(name)
    return linear.weight.detach().numpy(), linear.bias.detach().numpy()


def gram_of(rows: Array) -> Array:
    """Compute E[x x'] by a loop over tokens."""
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        total += np.outer(row, row)
    return total / len(rows)


def ridge_on(matrix: Array) -> Array:
    shifted: Array = matrix + RIDGE * np.trace(matrix) / len(matrix) * np.eye(len(matrix))
    return shifted


def best_of(score: Array) -> tuple[list[int], list[int]]:
    order = np.argsort(-score, kind="stable")
    return sorted(order[:HIDDEN].tolist()), sorted(order[HIDDEN:].tolist())


# The published methods: from rows of x and both layers' weights to a function of other rows of x, the reduced outputs.

Published = Callable[[Array, Array, Array, Array], Callable[[Array], Array]]


def grail(score: Callable[[Array, Array, Array], Array]) -> Published:
    def fitted(x: Array, first: Array, second: Array, bias: Array) -> Callable[[Array], Array]:
        """Fit GRAIL, section 3.1: B = G M' (M G M' + ridge I)^-1 with M the selection, W' = W B, the same bias."""
        kept, _ = best_of(score(x, first, second))
        selector = np.eye(x.shape[1])[kept]
        gram = gram_of(x)
        new = second @ (gram @ selector.T @ np.linalg.inv(ridge_on(selector @ gram @ selector.T)))
        return lambda rows: rows[:, kept] @ new.T + bias

    return fitted


def structured_wanda(x: Array, first: Array, second: Array) -> Array:
    scores = [
        sum(abs(w) for w in second[:, j]) * np.sqrt(sum(value**2 for value in x[:, j])) for j in range(x.shape[1])
    ]
    return np.array(scores)


def producer(power: int) -> Callable[[Array, Array, Array], Array]:
    return lambda x, first, second: np.array([sum(abs(w) ** power for w in row) for row in first])


def corp_v1(x: Array, first: Array, second: Array, bias: Array) -> Callable[[Array], Array]:
    """Fit CORP's first version: algorithm 2, then eq. 9-11 with uncentred second moments."""
    kept, pruned = best_of(np.array([np.mean(x[:, j] ** 2) for j in range(x.shape[1])]))
    sigma = gram_of(x)
    b = sigma[np.ix_(pruned, kept)] @ np.linalg.inv(ridge_on(sigma[np.ix_(kept, kept)]))
    mean = x.mean(0)
    c = mean[pruned] - b @ mean[kept]
    new, new_bias = second[:, kept] + second[:, pruned] @ b, bias + second[:, pruned] @ c
    return lambda rows: rows[:, kept] @ new.T + new_bias


def corp(x: Array, first: Array, second: Array, bias: Array) -> Callable[[Array], Array]:
    """Fit CORP: section 3.3's combined score, then eq. 9-11."""
    kept, pruned = best_of((x**2).mean(0) * np.linalg.norm(second, axis=0))
    mean = x.mean(0)
    sigma = gram_of(x - mean)
    b = sigma[np.ix_(pruned, kept)] @ np.linalg.inv(ridge_on(sigma[np.ix_(kept, kept)]))
    new = second[:, kept] + second[:, pruned] @ b
    return lambda rows: (rows - mean)[:, kept] @ new.T + second @ mean + bias


def vbp(x: Array, first: Array, second: Array, bias: Array) -> Callable[[Array], Array]:
    """Fit variance-based pruning of one layer: the least varying channels become their means."""
    kept, pruned = best_of(np.array([np.mean((x[:, j] - x[:, j].mean()) ** 2) for j in range(x.shape[1])]))
    new_bias = bias + sum(second[:, j] * x[:, j].mean() for j in pruned)
    return lambda rows: rows[:, kept] @ second[:, kept].T + new_bias


@pytest.mark.parametrize(
    ("preset", "select", "published"),
    [
        ("grail", None, grail(structured_wanda)),
        ("grail", "producer-l1", grail(producer(1))),
        ("grail", "producer-l2", grail(producer(2))),
        ("corp-v1", None, corp_v1),
        ("corp", None, corp),
        ("vbp", None, vbp),
    ],
)
def test_mlp_of_each_preset_equals_the_paper(
    moments: Moments, preset: str, select: str | None, published: Published
) -> None:
    method = method_from_preset(preset, mlp_sparsity=0.5, mlp_selection=select, align_hidden=8, ridge_rel=RIDGE)
    reduced = reduce(tiny.checkpoint().model, moments, method).model
    for site in SITES:
        x = recorded(f"{site}.fc2", "input", COUNT).reshape(-1, 192)
        new = published(x, layer(f"{site}.fc1")[0], *layer(f"{site}.fc2"))
        expected = new(recorded(f"{site}.fc2", "input", 6, 9).reshape(-1, 192))
        found = mlp(reduced, site, torch.from_numpy(recorded(site, "input", 6, 9))).numpy()
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-5 * np.abs(expected).max())


def test_merged_channels_equal_grails_folding(moments: Moments, images: Images) -> None:
    """GRAIL folds rows to means and sets B = G M' (M G M' + ridge I)^-1, with M the means over clusters."""
    method = method_from_preset("grail-fold", mlp_sparsity=0.5, align_hidden=8, ridge_rel=RIDGE)
    reduced = reduce(tiny.checkpoint().model, moments, method, images=images).model.state_dict()
    for site in SITES:
        (first, first_bias), (second, bias) = layer(f"{site}.fc1"), layer(f"{site}.fc2")
        cluster = cluster_rows(torch.from_numpy(first), HIDDEN, seed=0).tolist()
        merge = np.zeros((HIDDEN, 192))
        for channel, own in enumerate(cluster):
            merge[own, channel] = 1.0 / cluster.count(own)
        gram = gram_of(recorded(f"{site}.fc2", "input", COUNT).reshape(-1, 192))
        new = second @ gram @ merge.T @ np.linalg.inv(ridge_on(merge @ gram @ merge.T))
        np.testing.assert_allclose(reduced[f"{site}.fc1.weight"], merge @ first, atol=1e-6)
        np.testing.assert_allclose(reduced[f"{site}.fc1.bias"], merge @ first_bias, atol=1e-6)
        np.testing.assert_allclose(reduced[f"{site}.fc2.weight"], new, atol=1e-4 * np.abs(new).max())
        np.testing.assert_allclose(reduced[f"{site}.fc2.bias"], bias, atol=1e-7)


def heads_of(site: str, count: int, seed: int = 0) -> tuple[Array, Array]:
    """Return q and k of the dense model, [heads, images, tokens, D]."""
    qkv = recorded(f"{site}.qkv", "output", count, seed)
    rows = qkv.reshape(*qkv.shape[:2], 3, HEADS, DIM).transpose(2, 3, 0, 1, 4)
    return rows[0], rows[1]


@pytest.mark.parametrize(("preset", "select"), [("corp-v1", "energy"), ("corp-v1", "magnitude"), ("corp", "energy")])
def test_query_key_maps_equal_the_papers(moments: Moments, preset: str, select: Any) -> None:
    """Dimensions are ranked by algorithm 4 or section 4.4, then fitted by eq. 15 in its Kronecker form and eq. 16.

    The first version fits the Grams of all tokens; CORP sums the system image by image.
    """
    method = method_from_preset(preset, attention_sparsity=0.5, qk_selection=select, align_head=8, ridge_rel=RIDGE)
    reduced = reduce(tiny.checkpoint().model, moments, method).model
    for site in ("blocks.0.attn", "blocks.1.attn"):
        weight = layer(f"{site}.qkv")[0].reshape(3, HEADS, DIM, -1)
        entering = torch.from_numpy(recorded(site, "input", 5, 9))
        new = linear(reduced, f"{site}.qkv", entering).numpy()
        new_q, new_k, _ = np.split(new, (HEADS * WIDTH, 2 * HEADS * WIDTH), axis=-1)
        for head in range(HEADS):
            q, k = (rows[head] for rows in heads_of(site, COUNT))
            if select == "energy":
                score = sum(np.square(a).sum(0) * np.square(b).sum(0) for a, b in zip(q, k, strict=True))
            else:
                score = np.array([sum(weight[0, head, j] ** 2) * sum(weight[1, head, j] ** 2) for j in range(DIM)])
            kept = sorted(np.argsort(-np.asarray(score), kind="stable")[:WIDTH].tolist())
            pruned = [j for j in range(DIM) if j not in kept]
            parts = [(q.reshape(-1, DIM), k.reshape(-1, DIM))] if preset == "corp-v1" else zip(q, k, strict=True)
            system, cross = np.zeros((WIDTH**2, WIDTH**2)), np.zeros((WIDTH, WIDTH))
            for rows_q, rows_k in parts:
                q_gram, k_gram = gram_of(rows_q), gram_of(rows_k)
                system += np.kron(k_gram[np.ix_(kept, kept)], q_gram[np.ix_(kept, kept)])
                cross += q_gram[np.ix_(kept, pruned)] @ k_gram[np.ix_(pruned, kept)]
            vec: Array = np.linalg.inv(ridge_on(system)) @ cross.flatten(order="F")
            m = vec.reshape(WIDTH, WIDTH, order="F")
            own = slice(head * WIDTH, (head + 1) * WIDTH)
            q_other, k_other = (rows[head] for rows in heads_of(site, 5, 9))
            for image, (a, b) in enumerate(zip(q_other, k_other, strict=True)):
                expected = a[:, kept] @ (np.eye(WIDTH) + m) @ b[:, kept].T
                found = new_q[image, :, own] @ new_k[image, :, own].T
                np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_rankings_without_effect_are_refused() -> None:
    for preset in ("best", "grail", "vbp"):
        with pytest.raises(ValueError, match="can't be ranked by magnitude"):
            method_from_preset(preset, qk_selection="magnitude")
    with pytest.raises(ValueError, match="merges channels"):
        Method(mlp_selection="fold", mlp_recovery="affine", qk_recovery="keep")


# Reductions without loss: full width, and half width of models in which half of the channels are redundant


def logits(model: nn.Module) -> Tensor:
    return tiny.ran(model, tiny.images(5, seed=3)).double()


def assert_same(reduced: nn.Module, dense: nn.Module, limit: float = 1e-5) -> None:
    exact = logits(dense)
    assert float((logits(reduced) - exact).norm() / exact.norm()) < limit


CASES = [*((preset, "padded") for preset in PRESETS), ("best", "square")]


@pytest.mark.parametrize(("preset", "geometry"), CASES)
def test_full_width_equals_the_dense_model(moments: Moments, images: Images, preset: str, geometry: Any) -> None:
    method = method_from_preset(preset, mlp_sparsity=0.0, attention_sparsity=0.0, geometry=geometry)
    reduced = reduce(tiny.checkpoint().model, moments, method, images=images).model
    assert {site.width for site in sites_of(reduced).every} == {192, 48}
    assert_same(reduced, tiny.checkpoint().model)


def planted() -> tuple[Checkpoint, Moments]:
    """Make a model in which the later half of channels and of query and key dimensions copies the first half."""
    dense = tiny.checkpoint()
    with torch.no_grad():
        for name, parameter in dense.model.named_parameters():
            if ".attn.qkv." in name:
                by_head = parameter.view(3, 3, 16, -1)
                by_head[:2, :, 8:] = 0.01 * by_head[:2, :, :8]
            elif ".mlp.fc1." in name:
                parameter[96:] = parameter[:96]
            elif name.endswith(".mlp.fc2.weight"):
                parameter[:, 96:] *= 0.01
    opened = tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(24))
    return dense, calibrate(dense, opened, batch_size=8, statistics=Statistics(attention_system=True))


@pytest.mark.parametrize("preset", ["best", "corp"])
def test_redundancy_is_removed_without_loss(preset: str) -> None:
    dense, taken = planted()
    asked = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    assert_same(reduce(dense.model, taken, method_from_preset(preset, **asked)).model, dense.model, 2e-3)


def test_unrequested_sites_are_unchanged(moments: Moments) -> None:
    dense = tiny.checkpoint().model
    reduced = reduce(dense, moments, method_from_preset("best", mlp_sparsity=0.0)).model
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(reduced.get_parameter(name), dense.get_parameter(name))
    attention = reduce(dense, moments, method_from_preset("best", attention_sparsity=0.0))
    assert [site.part for site in attention.sites] == ["qk", "qk"]
    assert attention.sites[0].width == attention.sites[0].width_asked == 16


def test_command_keeps_everything_on_request(moments: Moments, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    save_moments(moments, tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "-o", tmp_path / "r"]
    refuses("nothing asked for", *words)
    invoked(*words, "--mlp", "0", "--attn", "0")
    assert_same(load_checkpoint(tmp_path / "r").model, tiny.checkpoint().model)
