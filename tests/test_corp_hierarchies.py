"""Hiera, MaxViT, CoAtNet, TinyViT, EfficientFormer: timm's function, planted redundancy, loops, and what is refused."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timm.models import maxxvit
from torch import nn

from calib.images import Images
from corp_deploy.families import timm_hierarchy
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.families.merging import Merging
from corp_deploy.families.steps import Branch, Walk
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import named, tokens_to_fit
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests import tiny
from tests.hierarchies import FORMS, checkpoint, pixels, theirs
from tests.small_models import error, outputs
from tests.test_corp_timm_planted import plant_channels_

HALF = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
ASIDE = ("maxvit_pm",)
"""Whose attentions stand two beside each other, in no branch of their own."""
TOLD = ("hiera", "maxvit_tf", "coatnet", "efficientformer_v2")
GRIDS = {"maxvit_tf": (12, 12), "maxxvit": (8, 8), "maxvit_pm": (8, 8), "coatnet": (6, 6), "coatnext": (4, 4)}
GRIDS |= {"tiny_vit": (3, 3), "efficientformer": (7, 7), "efficientformer_v2": (3, 3), "hiera": (3, 3)}
GRIDS |= {"hiera_abswin": (2, 3)}
"""Of the last maps, at the last size tried."""
OTHER_SIZE = {
    "hiera": {"img_size": 96},
    "maxvit_tf": {"img_size": 96},
    "coatnet": {"img_size": 96},
    "tiny_vit": {"img_size": 96},
    "efficientformer": {},  # of one size
    "efficientformer_v2": {"img_size": 96},
}


def opened(model: nn.Module, count: int, path: Path) -> Images:
    return tiny.opened(path / "images.npy", pixels(model, count).numpy(), model)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_model_is_timms_and_its_steps_are_the_model(form: str) -> None:
    for changes in ({}, OTHER_SIZE.get(form, {})):
        ours = checkpoint(form, **changes).model
        images, family = pixels(ours, 3), family_of(ours)
        assert family.NAME == timm_hierarchy.NAME
        timms = theirs(form, **changes)
        assert error(ours, timms, images) < 1e-6
        assert error(family.exportable(ours), timms, images) < 1e-6
        walk = Walk.of(family.embedded(ours, images), family.token_weights(ours, images), merges=False)
        for step in family.steps(ours):
            walk = walk.behind(step)
            assert walk.tokens.x.ndim == 3
            assert len(walk.tokens.x) == 3, step
        finished = family.finished(ours, walk.tokens.x, images).double()
        torch.testing.assert_close(finished, outputs(ours, images), rtol=1e-5, atol=1e-6)
        assert walk.tokens.x.shape[1] == len(family.token_kinds(ours))
        assert family.normed(ours, walk.tokens.x).shape[1] == len(family.token_kinds(ours))
    assert family.grid(ours, "") == GRIDS[form]
    branches = {step.name for step in family.steps(ours) if isinstance(step, Branch)}
    aside = {site.name for site in sites_of(ours).every} - branches
    assert bool(aside) == (form in ASIDE)
    assert tokens_to_fit(ours, "pooled") is None
    assert named(ours, None).startswith("all ")


def test_each_weight_counts() -> None:
    """That timm's function is ours isn't because it depends on nothing: every site's layers move the outputs."""
    for form in ("hiera", "maxvit_pm", "coatnext", "tiny_vit"):
        model = copy.deepcopy(checkpoint(form).model)
        images = pixels(model, 2)
        before = outputs(model, images)
        for site in sites_of(model).linear:
            for layer in (*site.firsts, site.last):
                weight = layer.weight.clone()
                layer.weight.mul_(1.5)
                assert float((outputs(model, images) - before).norm() / before.norm()) > 1e-5, site.name
                layer.weight.copy_(weight)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", OTHER_SIZE)
def test_full_width_is_the_dense_model_at_two_sizes(form: str, tmp_path: Path) -> None:
    for changes in ({}, OTHER_SIZE[form]):
        dense = checkpoint(form, **changes)
        taken = calibrate(dense, opened(dense.model, 8, tmp_path), batch_size=8)
        method = method_from_preset("best", mlp_sparsity=0.0, attention_sparsity=0.0, geometry="square")
        whole = reduce(dense.model, taken, method).model
        assert error(whole, dense.model, pixels(dense.model, 4, seed=3)) < 1e-5


def plant_heads_(site: HeadSite) -> None:
    """The second half of each head's dimensions are mixes of the first, wherever dimensions may be mixed."""
    sizes = (site.qk, site.qk, site.v)
    for rows in (site.first.weight, site.first.bias):
        for part, size in zip(rows.split([site.heads * each for each in sizes]), sizes, strict=True):
            if size == site.v or not site.keeps_qk:
                mix = torch.randn(size // 2, size // 2, generator=torch.Generator().manual_seed(2)) / size**0.5
                by_head = part.view(site.heads, size, -1)
                by_head[:, size // 2 :] = mix @ by_head[:, : size // 2]


def planted(form: str) -> Checkpoint:
    dense = checkpoint(form)
    model = copy.deepcopy(dense.model)
    for site in sites_of(model).channels:
        plant_channels_(site)
        if site.between is not None:
            half = site.width // 2
            for values in site.between.parameters():
                values[half:] = values[:half]
    for heads in sites_of(model).heads:
        if not heads.keeps_qk:
            plant_heads_(heads)
        else:
            rows = heads.first.weight[2 * heads.heads * heads.qk :].view(heads.heads, heads.v, -1)
            rows[:, heads.v // 2 :] = rows[:, : heads.v // 2].flip(1)
            bias = heads.first.bias[2 * heads.heads * heads.qk :].view(heads.heads, heads.v)
            bias[:, heads.v // 2 :] = bias[:, : heads.v // 2].flip(1)
    return replace(dense, model=model)


# By how many images: the last stages have few tokens.
PLANTED = {"hiera": 80, "maxvit_tf": 40, "maxvit_pm": 40, "coatnext": 40, "tiny_vit": 40, "efficientformer": 24}
PLANTED |= {"efficientformer_v2": 64}


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", PLANTED)
def test_planted_redundancy_goes_at_no_loss_at_every_site(form: str, tmp_path: Path) -> None:
    dense = planted(form)
    images = opened(dense.model, PLANTED[form], tmp_path)
    taken, others = calibrate(dense, images, batch_size=8), pixels(dense.model, 8, seed=5)
    method = method_from_preset("best", geometry="square", **HALF)
    if form == "efficientformer":  # whose values are wider than its queries
        method = replace(method, geometry="ragged")
    ways = [reduce(dense.model, taken, method).model]
    if form not in (*ASIDE, "efficientformer"):
        ways.append(reduce_closed_loop(dense.model, images, method).model)
    for narrower in ways:
        for before, after in zip(sites_of(dense.model).every, sites_of(narrower).every, strict=True):
            assert after.width != before.width, before.name
        assert error(narrower, dense.model, others) < 1e-3
    nothing_repaired = reduce(dense.model, taken, method_from_preset("none", **HALF)).model
    assert error(nothing_repaired, dense.model, others) > 0.02


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["hiera", "maxvit_tf", "coatnext", "tiny_vit"])
def test_best_is_below_corp_and_none_and_is_saved_and_loaded(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form)
    model = dense.model
    images, others = opened(model, 48, tmp_path), pixels(model, 12, seed=5)
    taken = calibrate(dense, images, batch_size=8, statistics=Statistics(attention_system=True))
    methods = {preset: method_from_preset(preset, **HALF) for preset in ("best", "corp", "none")}
    reduced = {preset: reduce(model, taken, method).model for preset, method in methods.items()}
    errors = {preset: error(each, model, others) for preset, each in reduced.items()}
    assert errors["best"] < errors["corp"] < errors["none"], errors
    chosen = reduce_closed_loop(model, images, methods["best"]).model
    # Of random weights the loop gains little, and on which side of a tie the choice of a ridge falls is rounding.
    assert error(chosen, model, others) < 1.02 * errors["best"]
    save(replace(dense, model=chosen), tmp_path / "reduced")
    again = load_checkpoint(tmp_path / "reduced").model
    # Weights lie elsewhere in memory, by which a product may be rounded otherwise.
    assert torch.allclose(outputs(again, others), outputs(chosen, others), rtol=1e-5, atol=1e-6)
    for name, weight in chosen.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_what_stays_is_said_with_its_reason() -> None:
    told = {form: {row["site"]: row for row in inspection_of_model(checkpoint(form).model)["sites"]} for form in TOLD}
    hiera = {name: row["width"] for name, row in told["hiera"].items() if name.endswith("attn")}
    assert hiera["blocks.0.attn"] == "1 heads, qk 16, v 16, square, 4 windows of 64x1"
    assert hiera["blocks.4.attn"] == "8 heads, qk 16, v 16, square"
    pooled = {name for name, row in told["hiera"].items() if "queries of several tokens become one" in row["reason"]}
    assert pooled == {"blocks.1.attn", "blocks.3.attn", "blocks.4.attn"}
    assert told["maxvit_tf"]["stages.0.blocks.0.attn_grid.attn"]["width"].endswith("16 grids of 4x4")
    for form, name, words in (
        ("maxvit_tf", "stages.0.blocks.0.conv", "squeeze and excitation"),
        ("coatnet", "stages.0.blocks.0", "squeeze and excitation"),
        ("efficientformer_v2", "stages.2.blocks.1.token_mixer", "an activation stands between its values"),
        ("efficientformer_v2", "stages.3.downsample", "an activation stands between its values"),
    ):
        assert words in told[form][name]["reason"]
        assert told[form][name]["width"] == "-"


def test_what_hierarchies_dont_take_is_refused(tmp_path: Path) -> None:
    model = checkpoint("maxvit_pm").model
    with pytest.raises(BadInput, match="so none can be merged away"):
        family_of(model).with_merging(model, Merging(schedule=(2, 2)))
    with pytest.raises(BadInput, match=r"both.attn_block.* stand in blocks that can't be taken apart"):
        reduce_closed_loop(model, opened(model, 16, tmp_path), method_from_preset("best", **HALF))
    with pytest.raises(BadInput, match=r"doesn't take images of 72x72 .* give another img_size"):
        checkpoint("maxvit_tf", img_size=72)
    offered = sites_of(theirs("hiera"))
    assert not offered.every
    assert [refusal.name for refusal in offered.refused] == [f"blocks.{number}" for number in range(5)]
    assert all("with_token_blocks" in refusal.reason for refusal in offered.refused)


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


@pytest.mark.parametrize(
    ("name", "kwargs", "kept"),
    [
        ("hiera_base_plus_224", {"stages": [1, 1, 1, 1]}, set()),
        ("maxvit_tiny_rw_224", {"depths": [1, 1, 1, 1]}, {"conv"}),
        ("maxxvitv2_nano_rw_256", {"depths": [1, 1, 1, 1]}, set()),
        ("coatnet_2_rw_224", {"depths": [1, 1, 1, 1]}, {"0"}),
        ("tiny_vit_21m_384", {"depths": [1, 1, 1, 1]}, set()),
        ("efficientformer_l3", {"depths": [1, 1, 1, 5]}, set()),
        ("efficientformerv2_l", {"depths": [1, 1, 1, 1], "mlp_ratios": 4}, {"token_mixer", "downsample"}),
    ],
)
def test_names_of_timm_have_sites_but_for_what_is_said(name: str, kwargs: dict[str, object], kept: set[str]) -> None:
    """By the last part of the places that stay; of all names of these classes see the README."""
    with torch.device("meta"):
        model = dense_from_architecture(Architecture(name=name, kwargs=kwargs))
    offered = sites_of(model)
    assert {refusal.name.rpartition(".")[2] for refusal in offered.refused} == kept
    blocks = {site.name.rpartition(".")[0] for site in offered.channels}
    stages = {block.split(".")[1] for block in blocks}
    assert len(stages) == (2 if name.startswith("coatnet") else 4), stages
    assert name.startswith("efficientformerv2") or offered.heads
