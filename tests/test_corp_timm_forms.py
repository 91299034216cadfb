"""Every form of timm's VisionTransformer: its sites and steps, what is reduced of it, redundancy planted at each site,
and statistics counted by hand.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.planning.budget_planner import budget_planner
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import Reduction, reduce, uniform_widths
from corp_deploy.reduction.named_loop import reduce_by_closed_loop
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.site import Site
from corp_deploy.traced.models.steps import StreamState
from corp_deploy.traced.models.values import TracedValues
from tests.small_models import error, outputs, pixels
from tests.vit_forms import FORMS, SITES, checkpoint, method, moments, opened

SEVERAL = ("attention pool", "q/k norm", "gate behind a norm", "gate apart", "side by side", "one layer for all")
"""Forms whose budgets differ: of what no site owns, of how many sites, of how they stand."""


@cache
def reduced(form: str, preset: str = "best") -> Reduction:
    return reduce(checkpoint(form).model, moments(form), method(preset))


def library(form: str) -> nn.Module:
    """timm's own of the same weights."""
    name, kwargs = FORMS[form]
    model: nn.Module = timm.create_model(name, **kwargs).eval()
    model.load_state_dict(checkpoint(form).model.state_dict())
    return model


@pytest.mark.parametrize("form", FORMS)
def test_its_steps_are_timms_model_and_its_sites_are_found(form: str) -> None:
    model = checkpoint(form).model
    images = pixels(model, 3)
    with torch.inference_mode():
        exact = library(form)(images)
        walk = StreamState.of(traced_model.embedded(model, images), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
        assert torch.equal(model(images), exact)
        torch.testing.assert_close(traced_model.finished(model, walk.tokens.x, images), exact)
        torch.testing.assert_close(traced_model.exportable(model)(images), exact, rtol=1e-4, atol=1e-4)
    offered, told = sites_of(model), inspection_of_model(model)
    assert (len(offered.every), offered.refused) == (SITES.get(form, 6), ())
    rows = [*told["sites"], *told["fixed"]]
    assert sum(row["parameters"] for row in rows) == told["parameters"] == parameters(model)
    assert sum(row["macs"] for row in rows) == told["macs"] == macs(model)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("preset", ["best", "corp"])
def test_nothing_removed_is_the_dense_model(form: str, preset: str) -> None:
    model, asked = checkpoint(form).model, method(preset, mlp_sparsity=0.0, attention_sparsity=0.0)
    assert error(reduce(model, moments(form), asked).model, model, pixels(model, 5, seed=3)) < 1e-5


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
def test_half_of_it_is_no_worse_than_its_repairs_promise(form: str, tmp_path: Path) -> None:
    """By the reports of sites, where presets tell errors in one unit; in the outputs no theorem says by how much."""
    dense = checkpoint(form)
    images = pixels(dense.model, 5, seed=3)
    done = {preset: reduced(form, preset) for preset in ("best", "corp", "none")}
    errors = {preset: {(each.site, each.part): each.error for each in of.sites} for preset, of in done.items()}
    for (site, part), of_best in errors["best"].items():
        if not site.startswith("blocks."):
            continue  # of one token, of which there are fewer than channels
        bounds = [errors["none"][site, part], *([errors["corp"][site, part]] if part == "mlp" else [])]
        assert all(of_best <= bound * (1.0 + 1e-9) for bound in bounds), (site, part)
    lost = {preset: error(of.model, dense.model, images) for preset, of in done.items()}
    assert lost["best"] < min(1.1 * lost["corp"], lost["none"]), lost
    looped = reduce_by_closed_loop(dense.model, opened(dense.model), method()).model
    assert error(looped, dense.model, images) < 2.0 * lost["best"]
    for model in (done["best"].model, looped):
        widths = {site.name: site.width for site in sites_of(model).every}
        assert widths == {site.name: site.width for site in sites_of(dense.model).every} | uniform_widths(
            dense.model, method()
        )
        save(replace(dense, model=model), tmp_path / "m")
        loaded = load_checkpoint(tmp_path / "m").model
        assert {site.name: site.width for site in sites_of(loaded).every} == widths
        assert torch.equal(outputs(loaded, images), outputs(model, images))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", SEVERAL)
def test_a_budget_is_met(form: str) -> None:
    own, asked = checkpoint(form), method(mlp_sparsity=None, attention_sparsity=None)
    sited = sum(row["macs"] for row in inspection_of_model(own.model)["sites"])
    share = 1.0 - 0.2 * sited / macs(own.model)
    planner = budget_planner(own, moments(form), asked, opened(own.model, 4), currency="macs")
    narrower = reduce(own.model, moments(form), asked, widths=planner.widths_at(share).widths).model
    assert macs(narrower) / macs(own.model) <= share < 1.0


MIX = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 8**0.5


@torch.no_grad()
def plant_(site: Site) -> None:
    """The later half of the groups, of each head, are mixes of the first half where they may be mixed, else copies."""
    of_heads = site.groups_HP if isinstance(site, TracedPairs) else None
    of_heads = site.groups_HV if isinstance(site, TracedValues) else of_heads
    groups_HP = torch.arange(site.width)[None] if of_heads is None else of_heads
    half = groups_HP.shape[1] // 2
    for span in site.groups.writers:
        rows_HPM, weight = torch.from_numpy(span.index_GM)[groups_HP], site.program.tensor(span.name)
        first = weight[rows_HPM[:, :half]]
        mixed = first if of_heads is None else torch.einsum("de,he...->hd...", MIX[:half, :half], first)
        weight[rows_HPM[:, half : 2 * half]] = mixed


def planted(form: str) -> Checkpoint:
    own = checkpoint(form)
    model = dense_from_architecture(own.architecture)
    state = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("mlp_bias"):  # that a program has joined with others
            tensor[len(tensor) // 2 :] = tensor[: len(tensor) // 2]
    model.load_state_dict(state)
    for site in sites_of(model).every:
        plant_(site)
    return replace(own, model=model.requires_grad_(False))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
def test_planted_redundancy_goes_at_no_loss(form: str) -> None:
    """`best` at half the width everywhere."""
    dense = planted(form)
    # A stem of convolutions leaves few tokens of such small images, a pool of attention one.
    count = {"gate behind a norm": 192, "attention pool": 384}.get(form, 24)
    images, asked = opened(dense.model, count), method(geometry="square")
    open_loop = reduce(dense.model, calibrate(dense, images, batch_size=8), asked)
    for done in (open_loop, reduce_by_closed_loop(dense.model, images, asked)):
        assert macs(done.model) < macs(dense.model)
        assert error(done.model, dense.model, pixels(dense.model, 5, seed=3)) < 1e-3


def heard(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """What enters a layer [X,F], image by image."""
    rows: list[Tensor] = []
    hooked = model.get_submodule(layer)
    handle = hooked.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].double().flatten(0, -2)))
    with torch.inference_mode():
        for image in images:
            model(image[None])
    handle.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "norms inside"])
def test_statistics_are_those_of_a_loop_over_images(form: str) -> None:
    """To the rounding of a float32 model, whose products depend on how many images go through it at once."""
    theirs, images = library(form), pixels(checkpoint(form).model, 24)
    found = {name: each for name, each in moments(form).sites.items() if isinstance(each, ChannelMoments)}
    assert len(found) >= 2  # one layer may read several sites
    for name, statistics in found.items():
        x_XF = heard(theirs, name, images)
        assert statistics.tokens == len(x_XF)
        mean_F, second_FF = x_XF.mean(dim=0), x_XF.mT @ x_XF / len(x_XF)
        assert float((statistics.mean_F - mean_F).norm()) < 1e-6 * float(second_FF.trace().sqrt()), name
        assert float((statistics.second_FF - second_FF).norm()) < 1e-6 * float(second_FF.norm()), name
