"""Attention in windows, with biases of places, of cosines, of heads that talk: what every such model goes through."""

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import beit, swin_transformer, swin_transformer_v2, vision_transformer_relpos
from torch import Tensor

from calib.collect import collect
from calib.moments import HeadMoments
from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import listened, sites_of
from corp_deploy.families.model_cost import macs
from corp_deploy.planning.budget_planner import budget_planner
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.reduction.named_loop import reduce_by_closed_loop
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.sites import calibration_taps
from corp_deploy.traced.models.steps import StreamState
from ground.errors import BadInput
from tests.biased_models import FORMS, SWIN, V1, checkpoint, library, moments, opened, pixels
from tests.small_models import error, outputs
from tests.vit_forms import method

OF_VIT = Counter({"traced queries and keys": 2, "traced values": 2, "traced channels": 2})
OF_SWIN = Counter({"traced queries and keys": 4, "traced values": 4, "traced channels": 4})
KINDS = {
    "windows": OF_SWIN,
    "padding": OF_SWIN,
    "cosines": OF_SWIN - Counter({"traced queries and keys": 4}),
    # Of those that read the class token alone too; what mixes heads has as many channels as there are.
    "talking heads": Counter({"traced queries and keys": 4, "traced values": 4, "traced channels": 6}),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_under_timms_names_are_the_model_and_its_sites_are_found(form: str, tmp_path: Path) -> None:
    theirs, (name, kwargs) = library(form), FORMS[form]
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    ours = load_dense(name, weights=tmp_path / "weights.safetensors", kwargs=kwargs).model
    images = pixels(ours, 3)
    assert error(ours, theirs, images) < 1e-6
    assert error(traced_model.exportable(ours), theirs, images) < 1e-6
    walk = StreamState.of(traced_model.embedded(ours, images), None)
    for step in traced_model.steps(ours):
        walk = walk.behind(step)
    torch.testing.assert_close(traced_model.finished(ours, walk.tokens.x, images), theirs(images))
    offered = sites_of(ours)
    assert not offered.refused
    assert Counter(site.kind for site in offered.every) == KINDS.get(form, OF_VIT)


RESAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "windows": (swin_transformer, {"img_size": 64, "window_size": 8}),
    "cosines": (swin_transformer_v2, {"img_size": 96, "window_size": 6, "pretrained_window_sizes": (8, 8)}),
    "tables": (beit, {"img_size": 48}),
    "networks": (vision_transformer_relpos, {"img_size": 48}),
}


@pytest.mark.parametrize("form", RESAMPLED)
def test_weights_of_another_size_are_resampled_as_timm_does(form: str, tmp_path: Path) -> None:
    (module, changes), (name, kwargs) = RESAMPLED[form], FORMS[form]
    state, theirs = library(form).state_dict(), timm.create_model(name, **kwargs | changes).eval()
    save_file(state, tmp_path / "weights.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, at what timm does there
        theirs.load_state_dict(module.checkpoint_filter_fn(dict(state), theirs))
    loaded = load_dense(name, weights=tmp_path / "weights.safetensors", kwargs=kwargs | changes)
    assert error(loaded.model, theirs, pixels(loaded.model, 2)) < 1e-6
    assert any("bias_table resampled" in note for note in loaded.notes) == (form in ("windows", "tables"))


def parts_of(mask_Wnn: Tensor | None, window: int, slots: int) -> list[Tensor]:
    """The slots [m] of each part of a window whose tokens see each other, by timm's own mask."""
    if mask_Wnn is None:
        return [torch.arange(slots)]
    parts = {tuple(row_n.nonzero().flatten().tolist()) for row_n in mask_Wnn[window] == 0.0}
    return [torch.tensor(part) for part in sorted(parts)]


def windows_of(map_HWC: Tensor, window: tuple[int, int], shift: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each window of a map its rows [n,C], zeros beyond the map, and which of them are there [n]."""
    (height, width), channels = map_HWC.shape[:2], map_HWC.shape[2]
    for top in range(0, height, window[0]):
        for left in range(0, width, window[1]):
            rows, there = [], []
            for down in range(top, top + window[0]):
                for right in range(left, left + window[1]):
                    inside = down < height and right < width
                    row = map_HWC[(down + shift[0]) % height, (right + shift[1]) % width]
                    rows.append(row if inside else torch.zeros(channels).double())
                    there.append(float(inside))
            yield torch.stack(rows), torch.tensor(there).double()


def counted_by_hand(block: Any, maps_BHWC: Tensor) -> dict[str, Tensor]:
    """The sums over q and k by loops over images, windows and what of a window sees each other."""
    qkv, mask = block.attn.qkv, block.attn_mask
    sums = dict.fromkeys(("qq_HDD", "kk_HDD", "kk_centred_HDD", "energy_HD"), torch.zeros(()).double())
    for map_HWC in maps_BHWC:
        for number, (x_nC, there_n) in enumerate(windows_of(map_HWC, block.window_size, block.shift_size)):
            for part_m in parts_of(mask, number, len(x_nC)):
                rows = (x_nC[part_m] @ qkv.weight.T + qkv.bias).view(len(part_m), 3, block.attn.num_heads, -1)
                q, k, _ = rows.permute(1, 2, 0, 3)
                q = block.attn.scale * q * there_n[part_m, None]  # nobody asks what padding is like
                centred = k - k.mean(dim=1, keepdim=True)
                of_part = {
                    "qq_HDD": q.mT @ q,
                    "kk_HDD": k.mT @ k,
                    "kk_centred_HDD": centred.mT @ centred,
                    "energy_HD": q.square().sum(dim=1) * k.square().sum(dim=1),
                }
                sums = {name: sums[name] + each for name, each in of_part.items()}
    return sums


@pytest.mark.parametrize("form", ["windows", "padding"])
def test_statistics_are_those_of_a_loop_over_images_and_windows(form: str) -> None:
    """11 images, so that a piece is filled up; as the dot product takes them, with their scale."""
    own, theirs = checkpoint(form).model, library(form).double()
    heard: dict[str, Tensor] = {}
    for name, block in theirs.named_modules():
        if isinstance(block, swin_transformer.SwinTransformerBlock):
            block.norm1.register_forward_hook(lambda _, __, out, name=name: heard.__setitem__(name, out))
    images = pixels(own, 11)
    theirs(images.double())
    moments = collect(listened(own), calibration_taps(own, sites_of(own)), [images], device="cpu")
    assert len(heard) == 4
    for name, maps_BHWC in heard.items():
        statistics = moments.sites[f"{name}.attn.qk"]
        assert isinstance(statistics, HeadMoments)
        for each, exact in counted_by_hand(theirs.get_submodule(name), maps_BHWC).items():
            assert float((getattr(statistics, each) - exact).norm()) < 1e-5 * float(exact.norm()), (name, each)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
def test_half_of_it_is_smaller_written_and_read_again(form: str, tmp_path: Path) -> None:
    """Repairs are better than none, and the closed loop is no worse."""
    own, others = checkpoint(form), pixels(checkpoint(form).model, 16, seed=5)
    halves = {preset: reduce(own.model, moments(form), method(preset)).model for preset in ("best", "corp", "none")}
    lost = {preset: error(half, own.model, others) for preset, half in halves.items()}
    assert lost["best"] < lost["corp"] < lost["none"], lost
    looped = reduce_by_closed_loop(own.model, opened(own.model, 64), method()).model
    assert error(looped, own.model, others) < 1.1 * lost["best"]
    assert macs(looped) < 0.85 * macs(own.model)
    assert not any("mlp_0" in name or "cpb_mlp" in name or "rel_pos.mlp" in name for name in looped.state_dict())
    save(replace(own, model=looped), tmp_path / "reduced")
    assert torch.equal(outputs(load_checkpoint(tmp_path / "reduced").model, others), outputs(looped, others))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["padding", "cosines", "tables, one of them for all blocks", "talking heads"])
def test_nothing_removed_is_the_dense_model(form: str) -> None:
    own, others = checkpoint(form), pixels(checkpoint(form).model, 4, seed=3)
    whole = method(mlp_sparsity=0.0, attention_sparsity=0.0)
    assert error(reduce(own.model, moments(form), whole).model, own.model, others) < 1e-5


def planted(form: str) -> Checkpoint:
    """The second half of each MLP's channels are copies of the first, that of a head's dimensions mixes of them."""
    own = checkpoint(form)
    model, mix = dense_from_architecture(own.architecture), torch.randn(8, 8) / 8**0.5
    state = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    for name, tensor in state.items():
        if ".mlp.fc1." in name:
            half = len(tensor) // 2
            tensor[half:] = tensor[:half]
        elif name.endswith((".qkv.weight", ".qkv.bias", ".v_bias", ".q_bias")):
            by_head = tensor.view(-1, 16, *tensor.shape[1:])
            first = 2 * len(by_head) // 3 if form == "cosines" and "qkv" in name else 0
            own_part = by_head[first:] if not (form == "cosines" and name.endswith("q_bias")) else by_head[:0]
            own_part[:, 8:] = torch.einsum("de,he...->hd...", mix, own_part[:, :8])
    model.load_state_dict(state)
    return replace(own, model=model.requires_grad_(False))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "talking heads"])
def test_planted_redundancy_goes_at_no_loss(form: str) -> None:
    torch.manual_seed(0)
    dense = planted(form)
    images, others = opened(dense.model, 32), pixels(dense.model, 8, seed=5)
    how = method(geometry="square")
    ways = (
        reduce(dense.model, calibrate(dense, images, batch_size=8), how),
        reduce_by_closed_loop(dense.model, images, how),
    )
    for way in ways:
        assert macs(way.model) < 0.85 * macs(dense.model)
        assert error(way.model, dense.model, others) < 1e-3


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["padding", "tables"])
def test_a_budget_is_used_and_kept_to(form: str) -> None:
    own, asked = checkpoint(form), method(mlp_sparsity=None, attention_sparsity=None)
    planner = budget_planner(own, moments(form), asked, opened(own.model, 16), currency="macs")
    new = reduce(own.model, moments(form), asked, widths=planner.widths_at(0.7).widths).model
    assert 0.62 < macs(new) / macs(own.model) <= 0.7


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["padding", "cosines", "tables", "talking heads"])
def test_half_of_the_heads_go_with_their_biases_and_scales(form: str, tmp_path: Path) -> None:
    """Of those that talk where their values are read; where the class token alone asks, a third of these is much."""
    own, others = checkpoint(form), pixels(checkpoint(form).model, 8, seed=5)
    asked = method(mlp_sparsity=0.0, attention_sparsity=0.0, heads_sparsity=0.5)
    widths = {name: each for name, each in uniform_widths(own.model, asked).items() if "token_only" not in name}
    reduction = reduce_by_closed_loop(own.model, opened(own.model, 32), asked, widths=widths)
    gone = [each for each in reduction.sites if each.part == "heads"]
    assert len(gone) == (4 if form in ("padding", "cosines") else 2)
    assert all(each.width == asked.heads_left(each.width_dense) for each in gone)
    assert macs(reduction.model) < macs(own.model)
    assert error(reduction.model, own.model, others) < 0.3
    save(replace(own, model=reduction.model), tmp_path / "model")
    assert torch.equal(outputs(load_checkpoint(tmp_path / "model").model, others), outputs(reduction.model, others))


def test_any_image_size_is_that_of_the_configuration() -> None:
    """Windows of each image's own size are those that it was traced with."""
    model = dense_from_architecture(Architecture(name=V1, kwargs=SWIN | {"dynamic_img_size": True}))
    assert len(sites_of(model).every) == 12
    with pytest.raises(BadInput, match="is added to no stream of its tokens, as in windows or on maps"):
        traced_model.with_merging(model, Merging(schedule=(2, 2)))
