"""The structure of timm's models of every form: weights, sites, what narrowing saves, sizes, what is refused.

Nothing is calibrated or solved here: numbers of reductions are in test_timm_reduction.py, test_timm_loops.py and
test_timm_planted.py, for the forms of NUMERIC in every run, for all others nightly.
"""

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.models import beit, maxxvit, swin_transformer, swin_transformer_v2, vision_transformer_relpos
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.narrowed_model import at_widths, first_groups, prove_kept
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.steps import StreamState
from ground.errors import BadInput
from tests.refusals import rejects
from tests.small_models import error
from tests.timm_models import (
    EVAS,
    FORMS,
    HIERARCHIES,
    NUMERIC,
    PLANTED_ALONE,
    SWIN,
    TURNED,
    V1,
    VITS,
    architecture,
    checkpoint,
    library,
    method,
    opened,
    pixels,
)

KINDS = ("traced queries and keys", "traced values", "traced channels", "traced convolutions", "traced streams")
FOUND: dict[str, tuple[int, ...]] = {
    "attention pool": (3, 3, 3), "q/k norm": (0, 2, 2), "gate behind a norm": (2, 2, 2, 6), "side by side": (4, 4, 4),
    "norms inside": (2,), "difference of softmaxes": (4, 2, 2), "one layer for all": (0, 2, 2),
    "one layer for all, a difference": (4, 2, 2),
    "turned, norms inside": (2,), "turned, attention pool": (3, 3, 3), "q/k norm, groups": (0, 2, 2),
    "windows": (4, 4, 4), "padding": (4, 4, 4), "cosines": (0, 4, 4),
    # Of those that read the class token alone too; what mixes heads has as many channels as there are.
    "talking heads": (4, 4, 6),
    "hiera": (5, 5, 5), "hiera_abswin": (4, 4, 4), "maxvit_tf": (4, 4, 5, 5, 1), "maxxvit": (4, 4, 6),
    "maxvit_pm": (4, 4, 2, 9, 1), "coatnet": (3, 3, 3, 3), "coatnext": (3, 3, 4), "tiny_vit": (4, 4, 4, 5, 1),
    "efficientformer": (1, 1, 5, 1, 3), "efficientformer_v2": (3, 3, 2, 7, 4),
}  # fmt: skip
"""Sites of each of KINDS, two of attentions' and MLPs' each unless it stands here."""
MIXING: dict[str, dict[str, int]] = {
    **{form: {"planes": 2} for form in TURNED}, "turned, attention pool": {"planes": 2, "free": 1},
    # Those that take the maximum of several tokens' queries.
    "hiera": {"free": 2, "none": 3}, "hiera_abswin": {"free": 1, "none": 3},
}  # fmt: skip
"""How many attentions' queries may be mixed so, freely where it doesn't stand here."""


def loaded_from(theirs: nn.Module, form: str, folder: Path, **changes: Any) -> Checkpoint:
    (name, kwargs), weights = FORMS[form], folder / "weights.safetensors"
    save_file(theirs.state_dict(), weights)
    return load_dense(name, weights=weights, kwargs=kwargs | changes)


def mixing_of(model: nn.Module) -> Counter[str]:
    """How many attentions' queries and keys may be mixed in each way."""
    return Counter(site.repair.mixing for site in sites_of(model).every if isinstance(site, TracedPairs))


@pytest.mark.parametrize("form", FORMS)
def test_timm_weights_load_and_sites_are_found(form: str, tmp_path: Path) -> None:
    """At another size than its class's where that is another table or other angles."""
    changes = {"img_size": 48} if form in EVAS else {}
    theirs = library(form, **changes)
    loaded = loaded_from(theirs, form, tmp_path, **changes)
    model, images = loaded.model, pixels(loaded.model, 3)
    assert not loaded.notes or form not in EVAS
    assert error(model, theirs, images) <= (0.0 if form in VITS else 1e-6)
    assert error(traced_model.exportable(model), theirs, images) < (1e-5 if form in VITS else 1e-6)
    steps = list(traced_model.steps(model))
    assert steps or form in HIERARCHIES
    if steps:
        walk = StreamState.of(traced_model.first_stream(model, images), None)
        for step in steps:
            walk = walk.behind(step)
        torch.testing.assert_close(traced_model.output_of_stream(model, walk.tokens.x, images), theirs(images))
    offered = sites_of(model)
    assert not offered.refused
    found = Counter(site.kind for site in offered.every)
    assert found == +Counter(dict(zip(KINDS, FOUND.get(form, (2, 2, 2)), strict=False)))
    assert mixing_of(model) == MIXING.get(form, +Counter(free=found[KINDS[0]]))
    told = inspection_of_model(model)
    rows = [*told["sites"], *told["fixed"]]
    assert sum(row["parameters"] for row in rows) == told["parameters"] == parameters(theirs)
    assert sum(row["macs"] for row in rows) == told["macs"] == macs(model)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", [form for form in FORMS if form not in NUMERIC or form in PLANTED_ALONE])
def test_half_width_saves_the_cost_of_its_sites_and_round_trips(form: str, tmp_path: Path) -> None:
    """Narrowing itself is proved on random inputs, and saved and loaded without a repair."""
    dense = checkpoint(form)
    every, widths = sites_of(dense.model).every, uniform_widths(dense.model, method())
    first = {site.name: first_groups(site.groups, widths[site.name]) for site in every if site.name in widths}
    kept, refused = prove_kept(dense.model, first)
    assert not refused
    assert {name: len(groups) for name, groups in kept.items()} == widths
    # Narrowing folds what no input changes, such as networks of biases, into constants: counted without it.
    folded, half = at_widths(dense.model, {}), at_widths(dense.model, widths)
    assert macs(folded) - macs(half) == pytest.approx(site_costs(dense.model, "macs").saved(every, widths))
    assert parameters(folded) - parameters(half) >= site_costs(dense.model, "params").saved(every, widths) > 0
    assert mixing_of(half) == mixing_of(dense.model)
    assert {site.name: site.width for site in sites_of(half).every} == {
        site.name: site.width for site in every
    } | widths
    save(replace(dense, model=half), tmp_path / "m")
    loaded = load_checkpoint(tmp_path / "m").model
    assert error(loaded, half, pixels(half, 3)) <= (1e-6 if form in HIERARCHIES else 0.0)


RESAMPLED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "windows": (swin_transformer, {"img_size": 64, "window_size": 8}, "bias_table resampled"),
    "cosines": (swin_transformer_v2, {"img_size": 96, "window_size": 6, "pretrained_window_sizes": (8, 8)}, ""),
    "tables": (beit, {"img_size": 48}, "bias_table resampled"),
    "networks": (vision_transformer_relpos, {"img_size": 48}, ""),
    "maxvit_tf": (
        maxxvit,
        {"img_size": 96, "transformer_window_size": [6, 6], "transformer_grid_size": [6, 6]},
        "resampled by timm",
    ),
}
"""By form the module of timm's filter, the changes, and what a note says."""


@pytest.mark.parametrize("form", RESAMPLED)
def test_weights_of_another_size_are_resampled_like_timm(form: str, tmp_path: Path) -> None:
    module, changes, note = RESAMPLED[form]
    theirs, state = library(form, **changes), library(form).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, at what timm does there
        theirs.load_state_dict(module.checkpoint_filter_fn(dict(state), theirs))
    loaded = loaded_from(library(form), form, tmp_path, **changes)
    assert error(loaded.model, theirs, pixels(loaded.model, 2)) < 1e-6
    assert any("bias_table resampled" in each or (note and note in each) for each in loaded.notes) == bool(note)


@pytest.mark.parametrize("form", ["halves turned, biases", "halves turned, registers"])
def test_weights_under_metas_names_load(form: str, tmp_path: Path) -> None:
    """A bias of keys is there, and is none."""
    theirs, state = library(form), {}
    for name, value in theirs.state_dict().items():
        name = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma").replace("reg_", "storage_")
        if form == "halves turned, registers":
            name = name.replace("mlp.fc1_g", "mlp.w1").replace("mlp.fc1_x", "mlp.w2").replace("mlp.fc2", "mlp.w3")
        state[name] = value
    state["storage_tokens"] = state.pop("storage_token")
    for index in (0, 1):
        q, v = (state.pop(f"blocks.{index}.attn.{part}_bias", torch.zeros(48)) for part in "qv")
        state[f"blocks.{index}.attn.qkv.bias"] = torch.cat([q, torch.full((48,), 9.0), v])
    save_file(state, tmp_path / "weights.safetensors")
    name, kwargs = FORMS[form]
    loaded = load_dense(name, weights=tmp_path / "weights.safetensors", kwargs=kwargs)
    assert error(loaded.model, theirs, pixels(loaded.model, 5, seed=3)) < 1e-6


MERGED = {
    "windows of any size": "layers.0.blocks.0.attn sees windows of 49 tokens, cut from a map",
    "maxvit_pm": "attn_block sees windows of 16 tokens, cut from a map",
    "hiera": "blocks.0.attn sees windows of 64 tokens, cut from a map",
    "coatnet": "stages.1.blocks.0.attn is added to no stream of its tokens, as on maps",
}


@pytest.mark.parametrize("form", MERGED)
def test_token_merging_is_refused_with_the_reason(form: str) -> None:
    if form in FORMS:
        model = checkpoint(form).model
    else:  # windows of each image's own size are those that it was traced with
        model = dense_from_architecture(Architecture(name=V1, kwargs=SWIN | {"dynamic_img_size": True}))
        assert len(sites_of(model).every) == 12
    rejects(MERGED[form], traced_model.with_merging, model, Merging(schedule=(2, 2)))


def test_size_that_windows_do_not_divide_is_refused() -> None:
    with pytest.raises(BadInput, match=r"MaxxVit can.t be traced: height .* must be divisible by window"):
        sites_of(dense_from_architecture(architecture("maxvit_tf", img_size=72)))


def test_positions_and_rotations_are_resampled_for_another_size(tmp_path: Path) -> None:
    form = "neighbours turned, packed gate"
    loaded = loaded_from(library(form), form, tmp_path, img_size=48)
    assert any("pos_embed resampled by timm" in note for note in loaded.notes)
    taken = calibrate(loaded, opened(loaded.model, 8), batch_size=8)
    done = reduce(loaded.model, taken, method(mlp_sparsity=0.0, attention_sparsity=0.0, conv_sparsity=0.0))
    assert error(done.model, loaded.model, pixels(loaded.model, 5, seed=3)) < 1e-5


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    name, kwargs = FORMS["hiera"]
    state = library("hiera").state_dict() | {"blocks.0.attn.qkv.weight": torch.zeros(3, 16)}
    torch.save(state, tmp_path / "other.pth")
    rejects(r"don't fit the model", load_dense, name, weights=tmp_path / "other.pth", kwargs=kwargs)
