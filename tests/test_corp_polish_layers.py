"""Layers fitted without a step size: the tangents against the models' own derivative, planted layers, no harm done."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import SwiGLU, SwiGLUPacked
from torch import Tensor, nn

from calib.images import Images
from corp_deploy.families.family import family_of
from corp_deploy.families.merging import Merging
from corp_deploy.families.modules import replaced
from corp_deploy.families.site import LinearSite
from corp_deploy.families.steps import Branch, Passage
from corp_deploy.families.widths import HeadWidths
from corp_deploy.polish.descent import Pace
from corp_deploy.polish.layers import fit_layers_, pairs_of, reduced_sites, walk_layers
from corp_deploy.polish.linearised import linearised
from corp_deploy.polish.newton import Newton
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.parts import Progress
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.closed_loop import Loop, reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.streams import Pair
from tests import tiny


def opened(model: nn.Module, count: int, seed: int = 0) -> Images:
    return tiny.opened(Path(tempfile.mkdtemp()) / "images.npy", tiny.images(count, seed), model)


def reduced(dense: nn.Module, **changes: Any) -> nn.Module:
    """The tiny ViT at half its widths by the closed loop."""
    asked = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8, **changes}
    return reduce_closed_loop(dense, opened(dense, 24), method_from_preset("best", **asked), loop=Loop()).model


def errors(dense: nn.Module, model: nn.Module, pairs: list[Pair]) -> dict[bool, float]:
    """Of the last streams, by whether held out."""
    walk_layers(dense, model, pairs, None, lambda *_: None)
    out = {}
    for held_out in (False, True):
        own = [pair for pair in pairs if pair.held_out == held_out]
        difference = torch.cat([pair.target - pair.reduced for pair in own])
        out[held_out] = float(difference.norm() / torch.cat([pair.target for pair in own]).norm())
    return out


def move_(site: LinearSite, step_RD: Tensor) -> None:
    """The first layers by so much; the rows of each in turn."""
    for first, rows in zip(site.firsts, step_RD.split([first.out_features for first in site.firsts]), strict=True):
        first.weight.add_(rows[:, :-1])
        first.bias.add_(rows[:, -1])


@pytest.mark.parametrize(
    "kwargs", [{}, {"init_values": 0.3}, {"qk_norm": True}, {"mlp_layer": SwiGLUPacked}, {"mlp_layer": SwiGLU}]
)
@pytest.mark.parametrize("merged", [False, True])
def test_a_branch_is_linearised_as_it_is(kwargs: dict[str, Any], merged: bool) -> None:
    """By the module's own outputs a little ahead and a little behind, layer scale and merged tokens included."""
    dense = tiny.checkpoint(**kwargs).model
    model = reduced(dense, geometry="square")
    model = family_of(model).with_merging(model, Merging(schedule=(3, 2))) if merged else model
    looked_at = []

    def compare(branch: Branch | Passage, name: str, pairs: list[Pair]) -> None:
        assert isinstance(branch, Branch), name
        site = family_of(model).sites(model).linear_by_name[name]
        (piece,) = linearised(branch, site, pairs)
        step_RD = torch.randn(
            sum(first.out_features for first in site.firsts),
            site.first.in_features + 1,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )
        if name.endswith("attn") and "qk_norm" in kwargs:
            step_RD[: 2 * 3 * 16] = 0.0  # queries and keys stay

        def added(share: float) -> Tensor:
            with torch.no_grad():
                move_(site, share * step_RD)
                out = branch.added(branch.run(branch.layer, pairs[0].reduced, pairs[0].present_BN))
                move_(site, -share * step_RD)
            return out.flatten(0, 1)

        change = (added(1e-5) - added(-1e-5)) / 2e-5
        torch.testing.assert_close(piece.tangent.along(step_RD), change, rtol=1e-6, atol=1e-6)
        lacking = (pairs[0].target - pairs[0].reduced).flatten(0, 1) - added(0.0)
        torch.testing.assert_close(piece.lacking_XO, lacking, rtol=1e-9, atol=1e-9)
        assert (piece.weight_X is not None and float(piece.weight_X.max()) > 1.0) == (pairs[0].sizes_BN is not None)
        looked_at.append(name)

    (pair, *_) = pairs_of(dense, opened(dense, 6), opened(dense, 6, 1))
    pairs = [Pair(dense=pair.dense.double(), reduced=pair.reduced.double(), held_out=False)]
    dense.double(), model.double()
    with torch.no_grad():
        walk_layers(dense, model, pairs, None, compare)
    assert looked_at == [f"blocks.{index}.{part}" for index in (0, 1) for part in ("attn", "mlp")]


@pytest.mark.parametrize("merged", [False, True])
def test_held_out_errors_never_rise_and_fall_at_last(merged: bool) -> None:
    dense = tiny.checkpoint().model
    model = reduced(dense)
    model = family_of(model).with_merging(model, Merging(schedule=(2, 2))) if merged else model
    both = [opened(dense, 24), opened(dense, 8, 1)]
    with torch.no_grad():
        before = errors(dense, model, pairs_of(dense, *both))
    fitted = replaced(model, {})
    fits = fit_layers_(dense, fitted, pairs_of(dense, *both), Newton(), sweeps=2)
    assert [fit.part for fit in fits] == reduced_sites_in_order(dense, model)
    assert all(fit.error <= fit.error_before for fit in fits)
    assert sum(fit.error < fit.error_before for fit in fits) >= 3
    with torch.no_grad():
        after = errors(dense, fitted, pairs_of(dense, *both))
    assert after[False] < 0.95 * before[False]
    assert after[True] < before[True]
    again = replaced(model, {})
    fit_layers_(dense, again, pairs_of(dense, *both), Newton(), sweeps=2)
    for own, other in zip(fitted.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=0.0)


def reduced_sites_in_order(dense: nn.Module, model: nn.Module) -> list[str]:
    return sorted(reduced_sites(dense, model), key=lambda name: (name.rpartition(".")[0], name.endswith("mlp")))


@pytest.mark.slow("models")
@torch.no_grad()
def test_planted_layers_come_back() -> None:
    """Half the hidden channels and half of each head's queries and keys do nothing in the dense model; the reduced one
    has the others, but disturbed.
    """
    dense = tiny.checkpoint(depth=1).model
    family = family_of(dense)
    mlp, attention = (family.sites(dense).linear_by_name[f"blocks.0.{part}"] for part in ("mlp", "attn"))
    mlp.last.weight[:, 96:] = 0.0
    rows = attention.first.weight[:96].view(2, 3, 16, 48)
    rows[:, :, 8:] = 0.0
    attention.first.bias[:96].view(2, 3, 16)[:, :, 8:] = 0.0
    widths: dict[str, int | HeadWidths] = {"blocks.0.mlp": 96, "blocks.0.attn": HeadWidths(qk=8, v=16)}
    method = method_from_preset("best", align_hidden=8, align_head=8)
    model = reduce_closed_loop(dense, opened(dense, 24), method, widths=widths).model
    for site in family.sites(model).linear:
        noise = torch.randn(site.first.weight.shape, generator=torch.Generator().manual_seed(2))
        site.first.weight.add_(0.1 * noise / site.first.in_features**0.5)
    pairs = pairs_of(dense, opened(dense, 64), opened(dense, 8, 1))
    fits = fit_layers_(dense, model, pairs, Newton(ridge_rel=1e-5, looks=(8, 30)), sweeps=8)
    assert all(fit.error < 0.05 * fit.error_before for fit in fits), fits


class Stopped(Exception):
    """What an interruption raises here."""


def test_an_interrupted_polish_of_layers_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """Reduced on few images, so that more of them have something to give."""
    dense, heard = tiny.checkpoint().model, list[Progress]()
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)
    model, images = reduce_closed_loop(dense, opened(dense, 8, 5), method).model, opened(dense, 24)
    options, state = PolishOptions(how="layer", steps=2), tmp_path / "state.safetensors"
    whole = polished(dense, model, images, options)

    def interrupt(progress: Progress) -> None:
        heard.append(progress)
        if len(heard) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        polished(dense, model, images, options, state=state, done=interrupt)
    again = polished(dense, model, images, options, state=state, done=heard.append)
    for own, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=0.0)
    report = whole.report
    assert [part.error for part in report.parts] == [part.error for part in again.report.parts]
    assert [part.part for part in report.parts] == reduced_sites_in_order(dense, model)
    assert report.error < report.error_before
    assert report.as_json()["gradients"] is False
    assert f"in 4 layers by least squares, without labels: {report.steps} sweeps" in report.line


def test_no_time_left_is_the_end_of_the_way() -> None:
    assert Pace(steps=None, seconds=0.0).way(0, 0.0) == 1.0
