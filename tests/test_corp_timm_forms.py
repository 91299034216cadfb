"""Every form of timm's VisionTransformer: what is reduced, what is refused, and the way to a graph."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families.family import family_of, input_ports, sites_of
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.families.steps import Branch, Fork, Join, Walk
from corp_deploy.planning.budget import allocate, dense_cost
from corp_deploy.planning.curves import cost_curves, eliminations
from corp_deploy.planning.probe import Probe
from corp_deploy.reduction.calibrate import Statistics, calibrate, chosen_sites
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from ground.errors import BadInput
from tests import tiny
from tests.vit_forms import FORMS, KINDS, NOTHING, REDUCED, checkpoint, method, moments, opened


def size_of(model: nn.Module) -> int:
    return input_ports(model)[0].shape[-1]


def outputs(model: nn.Module, seed: int = 3, count: int = 5) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(torch.from_numpy(tiny.images(count, seed, size_of(model))))
    return out.double()


def relative(model: nn.Module, dense: nn.Module, **how: int) -> float:
    exact = outputs(dense, **how)
    return float((outputs(model, **how) - exact).norm() / exact.norm())


@cache
def reduced(form: str, preset: str = "best") -> Reduction:
    return reduce(checkpoint(form).model, moments(form), method(preset))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_told_by_inspection(form: str) -> None:
    model = checkpoint(form).model
    told = inspection_of_model(model)
    rows = [*told["sites"], *told["fixed"]]
    assert sum(row["parameters"] for row in rows) == told["parameters"] == parameters(model)
    assert sum(row["macs"] for row in rows) == told["macs"] == macs(model)
    assert len(sites_of(model).every) == KINDS.get(form, 4)
    for row in told["sites"]:
        assert (row["width"] == "-") <= bool(row["reason"]), row
    if form == "attention pool":
        pool = next(row for row in told["fixed"] if row["name"] == "attn_pool")
        assert pool["macs"] > 0
        assert pool["parameters"] > 0
    if form == "gate behind a norm":
        assert any(row["name"] == "patch_embed.backbone" and row["macs"] > 0 for row in told["fixed"])


@pytest.mark.parametrize("form", [form for form in FORMS if form not in NOTHING])
def test_a_walk_through_the_branches_is_the_model(form: str) -> None:
    model = checkpoint(form).model
    family, x = family_of(model), torch.from_numpy(tiny.images(3))
    with torch.inference_mode():
        walk = Walk.of(family.embedded(model, x), None)
        assert len(family.token_kinds(model)) == walk.tokens.x.shape[1]
        steps = list(family.steps(model))
        assert all(isinstance(step, Branch | Fork | Join) for step in steps)
        for step in steps:
            walk = walk.behind(step)
        torch.testing.assert_close(family.finished(model, walk.tokens.x, x), model(x))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
@pytest.mark.parametrize("preset", ["best", "corp"])
def test_nothing_removed_is_the_dense_model(form: str, preset: str) -> None:
    asked = method(preset, mlp_sparsity=0.0, attention_sparsity=0.0)
    dense = checkpoint(form).model
    assert relative(reduce(dense, moments(form), asked).model, dense) < 1e-5


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
def test_nothing_removed_is_the_dense_model_at_another_size(form: str) -> None:
    size = 48
    dense = checkpoint(form, img_size=size)
    model = dense.model
    taken = calibrate(dense, opened(model, 8, size=size), batch_size=8)
    asked = method(mlp_sparsity=0.0, attention_sparsity=0.0)
    assert relative(reduce(model, taken, asked).model, model, count=2) < 1e-5


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
def test_repairs_are_better_than_none(form: str) -> None:
    """By the reports of sites, where presets tell errors in one unit; in the outputs no theorem says by how much."""
    dense = checkpoint(form).model
    done = {preset: reduced(form, preset) for preset in ("best", "corp", "none")}
    errors = {preset: {(each.site, each.part): each.error for each in of.sites} for preset, of in done.items()}
    assert errors["none"].keys() == errors["best"].keys()
    for (site, part), error in errors["none"].items():
        bounds = (errors["corp"][site, part], error) if part == "mlp" else (error,)
        assert all(errors["best"][site, part] <= bound * (1.0 + 1e-9) for bound in bounds), (site, part)
    of_outputs = {preset: relative(of.model, dense) for preset, of in done.items()}
    assert of_outputs["best"] < min(1.1 * of_outputs["corp"], of_outputs["none"]), of_outputs


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
def test_half_of_it_saved_and_loaded_is_the_same(form: str, tmp_path: Path) -> None:
    dense, narrower = checkpoint(form), reduced(form).model
    widths = {site.name: site.width for site in sites_of(narrower).every}
    assert all(width != site.width or site.reason for site in sites_of(dense.model).every
               for width in [widths[site.name]])  # fmt: skip
    save(Checkpoint(model=narrower, architecture=dense.architecture, lineage={}), tmp_path / "m")
    loaded = load_checkpoint(tmp_path / "m").model
    assert {site.name: site.width for site in sites_of(loaded).every} == widths
    for name, value in narrower.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    torch.testing.assert_close(outputs(loaded), outputs(narrower), rtol=0.0, atol=2e-6)  # bits: where weights lie


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
def test_a_closed_loop_walks_through(form: str) -> None:
    dense = checkpoint(form).model
    done = reduce_closed_loop(dense, opened(dense), method())
    assert {each.site for each in done.sites} >= {site.name for site in sites_of(dense).channels}
    assert relative(done.model, dense) < 2.0 * relative(reduced(form).model, dense)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", REDUCED)
def test_a_budget_is_met(form: str) -> None:
    dense, asked = checkpoint(form).model, method()
    known = eliminations(dense, moments(form), asked)
    pixels = next(iter(opened(dense, 4).batches(4)))
    probe = Probe(model=dense, moments=moments(form), method=asked, inputs=pixels, eliminations=known)
    whole, sited = dense_cost(dense, "macs"), sum(row["macs"] for row in inspection_of_model(dense)["sites"])
    share = 1.0 - 0.2 * sited / whole
    found = allocate(list(cost_curves(probe, "macs")), whole, share)
    narrower = reduce(dense, moments(form), asked, widths=found.widths, eliminations=known).model
    assert macs(narrower) / whole <= share < 1.0


@pytest.mark.parametrize("form", NOTHING)
def test_what_can_not_be_reduced_says_why(form: str) -> None:
    with pytest.raises(BadInput, match="nothing to calibrate"):
        chosen_sites(checkpoint(form), Statistics())
