"""Hiera, MaxViT, CoAtNet, TinyViT, EfficientFormer, their sites found in their programs: what all go through."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timm.models import maxxvit
from torch import nn

from calib.images import Images
from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import sites_of
from corp_deploy.families.model_cost import macs
from corp_deploy.families.site_cost import site_costs
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.reduction.named_loop import reduce_by_closed_loop
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.narrowing import at_widths
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.site import Site
from ground.errors import BadInput
from tests import tiny
from tests.hierarchies import FORMS, checkpoint, pixels, theirs
from tests.small_models import error, outputs

OTHER_SIZE = {"hiera", "maxvit_tf", "coatnet", "tiny_vit", "efficientformer_v2"}
POOLED = {"hiera": 3, "hiera_abswin": 3}
"""Attentions that take the maximum of several tokens' queries, so that no dimensions can be mixed."""


def method(preset: str, share: float = 0.5, **more: str) -> Method:
    shares = {"mlp_sparsity": share, "attention_sparsity": share, "conv_sparsity": share}
    aligned = {"align_hidden": 8, "align_head": 8, "align_conv": 8}
    return method_from_preset(preset, **shares, **aligned, **more)


def opened(model: nn.Module, count: int, path: Path) -> Images:
    return tiny.opened(path / "images.npy", pixels(model, count).numpy(), model)


def found(model: nn.Module) -> tuple[Site, ...]:
    """But for streams, which are asked for apart."""
    every = sites_of(model).every
    return tuple(site for site in every if site.kind != "traced streams")


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_timms_and_all_of_it_has_sites(form: str) -> None:
    """At another size too: whatever depends on it is the program's own."""
    for changes in ({}, {"img_size": 96}) if form in OTHER_SIZE else ({},):
        own, timms = checkpoint(form, **changes).model, theirs(form, **changes)
        images = pixels(own, 3)
        assert error(own, timms, images) < 1e-6
        assert error(traced_model.exportable(own), timms, images) < 1e-6
    offered, names = sites_of(own), [name for name, _ in own.named_modules() if "rel_pos" not in name]
    assert not offered.refused
    places = {site.name.rpartition(".")[0] for site in offered.every if isinstance(site, TracedPairs)}
    assert places == {name.rpartition(".")[0] for name in names if name.endswith((".qkv", ".k"))}
    written = {span.name for site in found(own) for span in site.groups.writers}
    firsts = {name for name in names if name.endswith(("mlp.fc1", "mlp.fc1.conv", "conv1_1x1"))}
    assert {f"{name}.weight" for name in firsts if f"{name}.weight" in own.state_dict()} <= written


@pytest.mark.parametrize("form", ["hiera", "coatnext", "tiny_vit"])
def test_sites_together_save_what_is_counted(form: str) -> None:
    """Queries and keys as narrow as values."""
    own = checkpoint(form).model
    widths = {site.name: site.width // site.parts // 2 * site.parts for site in found(own)}
    saved = site_costs(own, "macs").saved(sites_of(own).every, widths)
    assert saved == pytest.approx(macs(own) - macs(at_widths(own, widths)))


@torch.no_grad()
def planted(form: str) -> Checkpoint:
    """The second half of each part of every site is the first one again."""
    dense = checkpoint(form)
    for site in found(dense.model):
        part_G = torch.as_tensor(site.groups.part_G if site.parts > 1 else [0] * site.groups.size)
        halves = [torch.nonzero(part_G == part)[:, 0].chunk(2) for part in range(site.parts)]
        first, second = (torch.cat(each) for each in zip(*halves, strict=True))
        state = dense.model.state_dict()
        for span in (*site.groups.writers, *site.groups.between):
            if span.name in state:  # no bias that it hasn't got
                moved = state[span.name].movedim(span.axes[0], 0)
                index_GM = torch.from_numpy(span.index_GM)
                moved[index_GM[second].flatten()] = moved[index_GM[first].flatten()].clone()
    return dense


# By how many images: the last stages have few tokens.
PLANTED = {"hiera": 80, "maxvit_tf": 40, "maxvit_pm": 40, "coatnext": 40, "tiny_vit": 40, "efficientformer": 24}
PLANTED |= {"efficientformer_v2": 64}


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", PLANTED)
def test_planted_redundancy_goes_at_no_loss_at_every_site(form: str, tmp_path: Path) -> None:
    dense = planted(form)
    # EfficientFormer's values are four times as wide as its queries.
    half = method("best", geometry="padded" if form.startswith("efficientformer") else "square")
    images, others = opened(dense.model, PLANTED[form], tmp_path), pixels(dense.model, 8, seed=5)
    taken, asked = calibrate(dense, images, batch_size=8), uniform_widths(dense.model, half)
    if half.geometry == "square":
        assert len(found(dense.model)) - len(asked) == POOLED.get(form, 0)
    for narrower in (reduce(dense.model, taken, half).model, reduce_by_closed_loop(dense.model, images, half).model):
        widths = {site.name: site.width for site in found(narrower)}
        assert all(
            widths[site.name] < site.width or site.width == 8 for site in found(dense.model) if site.name in asked
        )
        assert error(narrower, dense.model, others) < 1e-3
    nothing_repaired = reduce(dense.model, taken, method("none")).model
    assert error(nothing_repaired, dense.model, others) > 0.02


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["hiera", "maxvit_tf", "coatnext", "tiny_vit"])
def test_best_is_below_corp_and_none_and_is_saved_and_loaded(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form)
    model = dense.model
    images, others = opened(model, 48, tmp_path), pixels(model, 12, seed=5)
    taken = calibrate(dense, images, batch_size=8, statistics=Statistics(attention_system=True))
    reduced = {preset: reduce(model, taken, method(preset)).model for preset in ("best", "corp", "none")}
    errors = {preset: error(each, model, others) for preset, each in reduced.items()}
    assert errors["best"] < errors["corp"] < errors["none"], errors
    chosen = reduce_by_closed_loop(model, images, method("best")).model
    # Of random weights the loop gains little, and on which side of a tie the choice of a ridge falls is rounding.
    assert error(chosen, model, others) < 1.02 * errors["best"]
    whole = reduce(model, taken, method("best", 0.0)).model
    assert error(whole, model, others) < 1e-5
    save(replace(dense, model=chosen), tmp_path / "reduced")
    again = load_checkpoint(tmp_path / "reduced").model
    assert torch.allclose(outputs(again, others), outputs(chosen, others), rtol=1e-5, atol=1e-6)
    for name, weight in chosen.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_queries_that_are_pooled_stay_with_the_reason(tmp_path: Path) -> None:
    dense = checkpoint("hiera")
    taken = calibrate(dense, opened(dense.model, 16, tmp_path), batch_size=8)
    reduction = reduce(dense.model, taken, method("best"))
    kept = {note.partition(" ")[0] for note in reduction.notes if "keeps Q/K" in note}
    assert kept == {f"blocks.{number}.attn.qk" for number in (1, 3, 4)}
    assert {each.part for each in reduction.sites if each.site.startswith("blocks.1.")} == {"mlp"}


def test_what_hierarchies_dont_take_is_refused() -> None:
    model = checkpoint("maxvit_pm").model
    with pytest.raises(BadInput, match="is added to no stream of its tokens, as in windows or on maps"):
        traced_model.with_merging(model, Merging(schedule=(2, 2)))
    name, kwargs = FORMS["maxvit_tf"]
    odd = dense_from_architecture(Architecture(name=name, kwargs={**kwargs, "img_size": 72}))
    with pytest.raises(BadInput, match=r"MaxxVit can.t be traced: height .* must be divisible by window"):
        sites_of(odd)


def test_weights_are_timms_of_any_window_and_others_are_refused(tmp_path: Path) -> None:
    """Position biases of other windows are resampled by timm's filter."""
    torch.save(theirs("maxvit_tf").state_dict(), tmp_path / "weights.pth")
    name, kwargs = FORMS["maxvit_tf"]
    wider = {"img_size": 96, "transformer_window_size": [6, 6], "transformer_grid_size": [6, 6]}
    loaded = load_dense(name, weights=tmp_path / "weights.pth", kwargs={**kwargs, **wider})
    assert any("resampled by timm" in note for note in loaded.notes)
    with torch.no_grad():
        timms = theirs("maxvit_tf", **wider)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = maxxvit.checkpoint_filter_fn(theirs("maxvit_tf").state_dict(), timms)
        timms.load_state_dict(state)
    assert error(loaded.model, timms, pixels(loaded.model, 2)) < 1e-6
    torch.save({**theirs("hiera").state_dict(), "blocks.0.attn.qkv.weight": torch.zeros(3, 16)}, tmp_path / "other.pth")
    name, kwargs = FORMS["hiera"]
    with pytest.raises(BadInput, match=r"don't fit the model"):
        load_dense(name, weights=tmp_path / "other.pth", kwargs=kwargs)
