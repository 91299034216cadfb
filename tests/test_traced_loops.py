"""Closed loops on models without a family of their own."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from calib.inputs import InputSet
from corp_deploy.algebra.norm_behind import DAMPING, NormBehind
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.layer_targets import Target, _pass_through, find_target, output_rows
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import find_read_places
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.traced.finding.cuts import input_free_nodes
from corp_deploy.traced.programs.readers import layers
from corp_deploy.traced.programs.tracing import trace
from tests.refusals import rejects
from tests.test_traced_chain import (
    HALF,
    apart,
    assert_saved_is_loaded,
    checkpoint_named,
    kept_of,
    own_checkpoint,
    with_repeated_heads,
)
from tests.traced_examples import images

SQUARE = method_from_preset("best", attention_sparsity=0.5, geometry="square", **HALF)
MLPS = method_from_preset("best", mlp_sparsity=0.5, align_hidden=4)


def opened(dense: Checkpoint, home: Path, count: int = 192) -> InputSet:
    np.save(home / "images.npy", images(count, seed=1))
    return images_for_model(dense.model, home / "images.npy")


class Heard(fx.Interpreter):
    """An interpreter of a model's program that returns every value in float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(tracing(model).program.graph, garbage_collect_values=False)

    def at(self, pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.run(pixels)
        return {node.name: value.double() for node, value in self.env.items() if isinstance(value, Tensor)}


def layer_of(model: nn.Module, weight: str) -> fx.Node:
    return next(layer.node for layer in layers(tracing(model).program) if layer.weight == weight)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", ["own", "pvt", "densenet"])
def test_closed_loops_reduce_every_site_and_are_saved(name: str, tmp_path: Path) -> None:
    dense = checkpoint_named(name)
    opened_images = opened(dense, tmp_path)
    method = SQUARE if name == "own" else method_from_preset("best", **HALF)
    before = {key: tensor.clone() for key, tensor in dense.model.state_dict().items()}
    asymmetric = reduce_traced(dense.model, opened_images, method, loop=Loop())
    symmetric = reduce_traced(dense.model, opened_images, method)
    plain = reduce(dense.model, calibrate(dense, opened_images, batch_size=16), method)
    for loop in (asymmetric, symmetric):
        assert {each.site: each.width for each in loop.sites} == {each.site: each.width for each in plain.sites}
        assert loop.coverage == plain.coverage
        assert apart(loop.model, dense.model) < 1.15 * apart(plain.model, dense.model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in dense.model.state_dict().items())
    # Without cuts, as in a DenseNet, every layer that writes a site reads another.
    assert any(each.alignment for each in asymmetric.sites) == (name != "densenet")
    assert all(each.loop is None for each in symmetric.sites)
    assert_saved_is_loaded(dense, asymmetric, tmp_path)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("how", ["open", "closed", "symmetric"])
@pytest.mark.parametrize("shared", [1, 2])
def test_duplicate_heads_are_removed_without_loss(shared: int, how: str, tmp_path: Path) -> None:
    """Heads that share keys and values are removed together."""
    dense = own_checkpoint(heads=4, shared=shared)
    with_repeated_heads(dense.model, shared)
    method, pixels = method_from_preset("best", heads_sparsity=0.5, ridge_rel=1e-9), opened(dense, tmp_path)
    if how == "open":
        reduction = reduce(dense.model, calibrate(dense, pixels, batch_size=16), method)
    else:
        reduction = reduce_traced(dense.model, pixels, method, loop=Loop() if how == "closed" else None)
    groups = 4 // shared
    told = [(each.site, each.part, each.width_dense, each.width) for each in reduction.sites]
    assert told == [(f"h.{block}.attn.v", "heads", groups, groups // 2) for block in range(2)]
    assert reduction.coverage.verdict == "2 of 2 sites reduced"
    assert all(each.r2 > 0.999 for each in reduction.sites)
    assert all((each.loop is not None) == (how == "closed") for each in reduction.sites)
    assert apart(reduction.model, dense.model) < 1e-4
    kept = kept_of(reduction.model)
    for block in range(2):
        queries, values = ({int(each) // 12 for each in kept[f"h.{block}.attn.{part}"]} for part in ("qk", "v"))
        assert queries == values
        assert {head % (groups // 2) for head in values} == set(range(groups // 2))
    assert_saved_is_loaded(dense, reduction, tmp_path)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("loop", [Loop(), None])
def test_unread_head_is_removed_before_dimensions(loop: Loop | None, tmp_path: Path) -> None:
    """Its dimensions would cost nothing either, but each remaining head keeps equally many."""
    dense = own_checkpoint()
    with torch.no_grad():
        for block, head in enumerate((2, 0)):
            dense.model.get_parameter(f"h.{block}.attn.c_proj.weight")[:, 16 * head : 16 * head + 16] = 0.0
    method = replace(SQUARE, mlp_sparsity=None, conv_sparsity=None, heads_sparsity=1 / 3)
    opened_images = opened(dense, tmp_path)
    reduction = reduce_traced(dense.model, opened_images, method, loop=loop)
    told = [(each.site, each.part, each.width) for each in reduction.sites if "h.0" in each.site]
    assert told == [("h.0.attn.v", "heads", 2), ("h.0.attn.qk", "qk", 8), ("h.0.attn.v", "v", 8)]
    of_heads = [each for each in reduction.sites if each.part == "heads"]
    assert all(each.error < 1e-6 * each.energy for each in of_heads)
    kept = kept_of(reduction.model)
    for block, heads in enumerate(({0, 1}, {1, 2})):
        for part in ("qk", "v"):
            groups = kept[f"h.{block}.attn.{part}"]
            assert len(groups) == 16
            assert {int(each) // 16 for each in groups} == heads
    plain = reduce(dense.model, calibrate(dense, opened_images, batch_size=16), method)
    assert apart(reduction.model, dense.model) < 1.15 * apart(plain.model, dense.model)


@pytest.mark.slow("graph")
def test_missing_inputs_of_a_loop_are_named(tmp_path: Path) -> None:
    dense = own_checkpoint()
    lacking = opened(dense, tmp_path, 3)
    rejects("got 3 images, expected at least 4", reduce_traced, dense.model, lacking, MLPS, loop=Loop())


def moves_the_outputs(model: nn.Module, layer: str, place: int, pixels: Tensor) -> bool:
    """Return whether noise on a layer's output at one place changes the model's output."""

    def moved(_: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        return out.index_add(1, torch.tensor([place]), torch.randn(len(out), 1, out.shape[-1]))

    with torch.no_grad():
        before = model(pixels)
        handle = model.get_submodule(layer).register_forward_hook(moved)
        after = model(pixels)
        handle.remove()
    return not torch.equal(before, after)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("read", [0, 2])
def test_read_positions_are_those_that_change_the_outputs(read: int) -> None:
    model, pixels = own_checkpoint(read=read).model, torch.from_numpy(images(2, seed=1))
    own = tracing(model)
    found = find_read_places(own, torch.device("cpu"))
    for layer in layers(own.program):
        if layer.name.startswith("h."):
            every = [moves_the_outputs(model, layer.name, place, pixels) for place in range(16)]
            told = found.get(layer.node)
            assert every == ([True] * 16 if told is None else told.tolist()), layer.name
    assert len(found) == (3 if read else 0)


class Scaled(nn.Module):
    """A model with a branch that is scaled and rolled into a stream, and one of whose tokens some are cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.gamma = nn.Parameter(torch.tensor([0.5, 2.0, -1.0, 1.0, 3.0, 0.1]))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        moved = (self.gamma * self.scaled(x.relu()) + 1.0).roll(1, 1)
        x = x + moved
        padded = nn.functional.pad(x, (0, 0, 0, 2))
        return self.last(x + self.cut(padded.relu())[:, :5])


@pytest.mark.parametrize("weight", ["scaled.weight", "cut.weight"])
def test_residual_error_is_propagated_back_to_the_layer(weight: str) -> None:
    """Adding the residual to the layer's output gives the wanted stream."""
    torch.manual_seed(0)
    model = Scaled().eval()
    program = trace(model, [torch.zeros(2, 5, 6)])
    node = next(layer.node for layer in layers(program) if layer.weight == weight)
    target: Target = find_target(node, input_free_nodes(program))
    assert target.at is not None
    interpreter = fx.Interpreter(program.graph, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(torch.randn(3, 5, 6))
        values = dict(interpreter.env)
        wanted = dict(values)
        wanted[target.at] = values[target.at] + torch.randn_like(values[target.at])
        found = target.residual(wanted, values)
        assert found.gain_O is not None
        change = found.residual / found.gain_O
        before, behind = (_pass_through(node, own, target.way, values) for own in (values[node], values[node] + change))
        moved = behind.output - before.output
    assert torch.allclose(moved, wanted[target.at] - values[target.at], atol=1e-4)
    if weight == "cut.weight":
        assert found.counts is not None
        assert int(found.counts.sum()) == 3 * 5
        assert len(output_rows(found.residual, node)) == 3 * 7


class Normed(nn.Module):
    """A model with a branch that is cut, rolled, normed and scaled on its way into a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6, eps=1e-6)
        self.gamma, self.last = nn.Parameter(torch.tensor([0.5, 2.0, -1.0, 1.0, 3.0, 0.1])), nn.Linear(6, 2)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        given = self.own(nn.functional.pad(x.relu(), (0, 0, 0, 2)))[:, :5].roll(2, 1)
        return self.last(x + self.gamma * self.norm(given))


def test_residual_error_is_propagated_back_through_a_norm() -> None:
    """Tokens that are cut off don't count."""
    torch.manual_seed(0)
    model = Normed().eval().double()
    program = trace(model, [torch.zeros(2, 5, 6, dtype=torch.float64)])
    node = next(layer.node for layer in layers(program) if layer.weight == "own.weight")
    target = find_target(node, input_free_nodes(program))
    assert target.norm is not None
    values = list[dict[fx.Node, Any]]()
    with torch.no_grad():
        for _ in range(2):
            interpreter = fx.Interpreter(program.graph, garbage_collect_values=False)
            interpreter.run(torch.randn(3, 5, 6, dtype=torch.float64))
            values.append(dict(interpreter.env))
        dense, student = values
        found = target.residual(dense, student)
        assert target.at is not None
        assert target.other is not None
        added = dense[target.at] - student[target.other]
    gain_C, offset_C = (model.gamma * each for each in (model.norm.weight, model.norm.bias))
    assert found.gain_O is not None
    assert found.weights is not None
    torch.testing.assert_close(found.gain_O, gain_C)
    change, weights = found.residual / gain_C, found.weights.view(3, 7)
    for image, place in product(range(3), range(5)):
        own_C, dense_C = student[node][image, place], dense[node][image, place]
        wanted_C = wanted_by_hand(gain_C, offset_C, added[image, (place + 2) % 5], dense_C, DAMPING)
        torch.testing.assert_close(change[image, place], wanted_C - own_C, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(weights[image, place], 1.0 / (dense_C.var(correction=0) + 1e-6))
    assert found.counts is not None
    assert found.counts.view(3, 7).tolist() == [[True] * 5 + [False] * 2] * 3


def wanted_by_hand(gain_C: Tensor, offset_C: Tensor, added_C: Tensor, given_C: Tensor, damping: float) -> Tensor:
    """Solve by lstsq for the change that keeps mean and deviation, with the norm's slope from autograd."""
    width = len(given_C)

    def normed(y_C: Tensor) -> Tensor:
        return F.layer_norm(y_C, (width,), gain_C, offset_C, 1e-6)

    slope_CC = torch.autograd.functional.jacobian(normed, given_C)
    fixed_2C = torch.stack([torch.ones_like(given_C), given_C - given_C.mean()])
    basis_CT = torch.linalg.svd(fixed_2C)[2][torch.linalg.matrix_rank(fixed_2C) :].T
    sigma = (given_C.var(correction=0) + 1e-6).sqrt()
    pull = (damping * gain_C.square().mean()).sqrt() / sigma
    rows = torch.cat([slope_CC @ basis_CT, pull * basis_CT])
    drift_C = torch.cat([added_C - normed(given_C), torch.zeros(width, dtype=added_C.dtype)])
    change_T: Tensor = torch.linalg.lstsq(rows, drift_C[:, None], driver="gelsd").solution.squeeze(1)
    return given_C + basis_CT @ change_T


@pytest.mark.parametrize("case", ["random", "silent channels", "one large channel", "constant"])
def test_layer_targets_are_the_damped_least_squares_solution(case: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gain_C, offset_C, given_XC, drift_XC = drawn(7), drawn(7), drawn(5, 7), drawn(5, 7)
    if case == "silent channels":
        gain_C[:2] = torch.tensor([0.0, 1e-9])
    if case == "one large channel":
        given_XC[:, 3] += 1e3
    if case == "constant":
        given_XC[:] = 0.7
    added_XC = F.layer_norm(given_XC, (7,), gain_C, offset_C, 1e-6) + drift_XC
    norm = NormBehind(gain_C=gain_C, eps=1e-6)
    before_XC = norm.before((added_XC - offset_C)[None], given_XC[None])[0]
    for before_C, added_C, given_C in zip(before_XC, added_XC, given_XC, strict=True):
        expected_C = wanted_by_hand(gain_C, offset_C, added_C, given_C, DAMPING)
        torch.testing.assert_close(before_C, gain_C * expected_C, rtol=1e-7, atol=1e-9)
    still_XC = F.layer_norm(given_XC, (7,), gain_C, offset_C, 1e-6)
    torch.testing.assert_close(norm.before((still_XC - offset_C)[None], given_XC[None])[0], gain_C * given_XC)
