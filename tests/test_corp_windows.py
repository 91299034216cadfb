"""Attention in windows: timm's function, statistics by window, costs, planted redundancy, and what is refused."""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models.swin_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from calib.collect import collect
from calib.images import Images
from calib.moments import HeadMoments
from corp_deploy.families import timm_swin, timm_windows
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.families.merging import Merging
from corp_deploy.families.modules import replaced
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.steps import Branch, Walk
from corp_deploy.families.timm_windows import with_inner_windows
from corp_deploy.families.widths import HeadWidths
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.read_tokens import named, tokens_to_fit
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from ground.errors import BadInput
from tests import tiny
from tests.small_models import error, outputs
from tests.test_corp_timm_planted import plant_channels_, plant_heads_
from tests.windowed_models import FORMS, V1, checkpoint, pixels

HALF = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}


def opened(model: nn.Module, count: int, path: Path) -> Images:
    return tiny.opened(path / "images.npy", pixels(model, count).numpy(), model)


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        *((form, {}) for form in FORMS),
        ("windows", {"img_size": 72, "always_partition": True}),
        ("cosines", {"img_size": 64, "pretrained_window_sizes": (4, 4)}),
    ],
)
def test_a_model_is_timms_and_its_steps_are_the_model(form: str, changes: dict[str, object]) -> None:
    ours = checkpoint(form, **changes).model
    name, kwargs = FORMS[form]
    theirs = timm.create_model(name, **kwargs | changes).eval()
    tiny.enliven(theirs, 0)
    ours.load_state_dict(timm_windows.own_state(ours, theirs.state_dict()))
    images, family = pixels(ours, 3), family_of(ours)
    assert error(ours, theirs, images) < 1e-6
    assert error(family.exportable(ours), theirs, images) < 1e-6
    with torch.no_grad():
        walk = Walk.of(family.embedded(ours, images), family.token_weights(ours, images), merges=False)
        for step in family.steps(ours):
            walk = walk.behind(step)
            assert walk.tokens.x.ndim == 3
            assert len(walk.tokens.x) == 3, step
        finished = family.finished(ours, walk.tokens.x, images).double()
    torch.testing.assert_close(finished, outputs(ours, images), rtol=1e-5, atol=1e-6)
    assert walk.tokens.x.shape[1] == len(family.token_kinds(ours))
    branches = {step.name for step in family.steps(ours) if isinstance(step, Branch)}
    assert branches == {site.name for site in sites_of(ours).every}
    assert not sites_of(ours).refused
    assert tokens_to_fit(ours, "pooled") is None
    assert named(ours, None).startswith("all ")


class Rounded(nn.Module):
    """Whole parts of `step` up to `most`, so that float32 sums of products are exact."""

    def __init__(self, step: float, most: float) -> None:
        super().__init__()
        self.step, self.most = step, most

    def forward(self, x: Tensor) -> Tensor:
        return (x.clamp(-self.most, self.most) / self.step).round() * self.step


def rounded(model: nn.Module) -> nn.Module:
    """The model with whole numbers for queries and keys and quarters for what enters the projections."""
    modules: dict[str, nn.Module] = {}
    for site in sites_of(model).heads:
        block = site.name.removesuffix(".attn")
        modules[f"{block}.norm1"] = nn.Sequential(model.get_submodule(f"{block}.norm1"), Rounded(1.0, 2.0))
        modules[f"{site.name}.norm"] = Rounded(0.25, 4.0)
    changed = replaced(model, modules)
    for site in sites_of(changed).heads:
        weight = site.first.weight.data
        weight.copy_(
            weight.sign() * (weight.abs() > weight.abs().kthvalue(weight.shape[1] - 3, dim=1, keepdim=True)[0])
        )
        site.first.bias.data.round_()
    return changed


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


def upper(matrix_HDD: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(*matrix_HDD.shape[1:])
    return matrix_HDD[:, rows, columns]


def counted_by_hand(site: HeadSite, maps_BHWC: Tensor, mask_Wnn: Tensor | None) -> dict[str, Tensor]:
    """The sums over q and k by loops over images, windows and what of a window sees each other."""
    assert site.windows is not None
    names = ("q_sum_HD", "k_sum_HD", "qq_HDD", "kk_HDD", "kk_centred_HDD", "energy_HD", "system_HTT")
    sums = dict.fromkeys(names, torch.zeros(()).double())
    weight, bias = site.first.weight.double(), site.first.bias.double()
    for map_HWC in maps_BHWC:
        windows = windows_of(map_HWC, site.windows.plan.window, site.windows.plan.shift)
        for number, (x_nC, there_n) in enumerate(windows):
            for part_m in parts_of(mask_Wnn, number, len(x_nC)):
                rows = (x_nC[part_m] @ weight.T + bias).view(len(part_m), 3, site.heads, -1)
                q, k, _ = rows.permute(1, 2, 0, 3)
                q = q * there_n[part_m, None]
                centred = k - k.mean(dim=1, keepdim=True)
                of_part = {
                    "q_sum_HD": q.sum(dim=1),
                    "k_sum_HD": k.sum(dim=1),
                    "qq_HDD": q.mT @ q,
                    "kk_HDD": k.mT @ k,
                    "kk_centred_HDD": centred.mT @ centred,
                    "energy_HD": q.square().sum(dim=1) * k.square().sum(dim=1),
                    "system_HTT": upper(k.mT @ k)[:, :, None] * upper(q.mT @ q)[:, None, :],
                }
                sums = {name: sums[name] + each for name, each in of_part.items()}
    return sums


@pytest.mark.parametrize(("form", "window"), [("windows", (8, 8)), ("padding", (4, 8))])
@torch.no_grad()
def test_statistics_are_those_of_a_loop_over_images_and_windows(form: str, window: tuple[int, int]) -> None:
    """Windows of powers of two, so that means of whole numbers are exact; 11 images, so that a piece is filled up."""
    size = (64, 64) if form == "windows" else (40, 64)
    model = rounded(checkpoint(form, window_size=window, img_size=size).model)
    name, kwargs = FORMS[form]
    timms = timm.create_model(name, **kwargs | {"window_size": window, "img_size": size})
    images, heard = pixels(model, 11), dict[str, tuple[Tensor, Tensor]]()
    for site in sites_of(model).heads:
        norm = model.get_submodule(f"{site.name.removesuffix('.attn')}.norm1")
        entering: list[Tensor] = []
        with_hooks = (
            norm.register_forward_hook(lambda _, __, out, to=entering: to.append(out.double())),
            site.last.register_forward_pre_hook(lambda _, inputs, to=entering: to.append(inputs[0].double())),
        )
        outputs(model, images)
        heard[site.name] = entering[0], entering[1]
        for hook in with_hooks:
            hook.remove()
    moments = collect(model, calibration_taps(model, sites_of(model)), [images], device="cpu", attention_system=True)
    for site in sites_of(model).heads:
        assert site.windows is not None
        statistics, (x_BNC, z_BNC) = moments.sites[site.name], heard[site.name]
        assert isinstance(statistics, HeadMoments)
        plan = site.windows.plan
        mask = timms.get_submodule(site.name.removesuffix(".attn")).attn_mask
        assert mask is None or isinstance(mask, Tensor)
        exact = counted_by_hand(site, x_BNC.unflatten(1, plan.grid), None if mask is None else mask.double())
        exact |= {"z_sum_C": z_BNC.sum(dim=(0, 1)), "zz_CC": sum(z_NC.T @ z_NC for z_NC in z_BNC)}
        for name, total in exact.items():
            assert float((getattr(statistics, name) - total).norm()) < 1e-9 * float(total.norm()), (site.name, name)
        assert (statistics.images, statistics.tokens) == (11, 11 * plan.grid[0] * plan.grid[1])
    plans = [site.windows.plan for site in sites_of(model).heads if site.windows is not None]
    assert any(any(plan.shift) for plan in plans)
    assert any(plan.padded != plan.grid for plan in plans) == (form == "padding")


@pytest.mark.parametrize("form", FORMS)
def test_full_width_is_the_dense_model(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form)
    taken = calibrate(dense, opened(dense.model, 16, tmp_path), batch_size=8)
    for settings in ({}, {"geometry": "square"}):
        method = method_from_preset("best", mlp_sparsity=0.0, attention_sparsity=0.0, **settings)
        whole = reduce(dense.model, taken, method).model
        assert error(whole, dense.model, pixels(dense.model, 4, seed=3)) < 1e-5


def planted(form: str) -> Checkpoint:
    dense = checkpoint(form)
    model = copy.deepcopy(dense.model).requires_grad_(False)
    for channels in sites_of(model).channels:
        plant_channels_(channels)
    for heads in sites_of(model).heads:
        plant_heads_(heads)
    return replace(dense, model=model)


@pytest.mark.parametrize("form", FORMS)
def test_planted_redundancy_goes_at_no_loss_at_every_site(form: str, tmp_path: Path) -> None:
    dense = planted(form)
    images = opened(dense.model, 32, tmp_path)
    taken, others = calibrate(dense, images, batch_size=8), pixels(dense.model, 8, seed=5)
    method = method_from_preset("best", geometry="square", **HALF)
    ways = [reduce(dense.model, taken, method).model, reduce_closed_loop(dense.model, images, method).model]
    for narrower in ways:
        assert all(site.width == HeadWidths(qk=16 if site.keeps_qk else 8, v=8) for site in sites_of(narrower).heads)
        assert error(narrower, dense.model, others) < 1e-3
    nothing_repaired = reduce(dense.model, taken, method_from_preset("none", **HALF)).model
    assert error(nothing_repaired, dense.model, others) > 0.05


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", FORMS)
def test_best_is_below_corp_and_none_and_is_saved_and_loaded(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form)
    model = dense.model
    images, others = opened(model, 64, tmp_path), pixels(model, 16, seed=5)
    taken = calibrate(dense, images, batch_size=8, statistics=Statistics(attention_system=True))
    methods = {preset: method_from_preset(preset, **HALF) for preset in ("best", "corp", "none")}
    reduced = {preset: reduce(model, taken, method).model for preset, method in methods.items()}
    errors = {preset: error(each, model, others) for preset, each in reduced.items()}
    assert errors["best"] < errors["corp"] < errors["none"], errors
    chosen = reduce_closed_loop(model, images, methods["best"]).model
    # Norms behind the layers start near zero, and so add little that could be wrong.
    assert error(chosen, model, others) < errors["best"] * (1.1 if form == "cosines" else 1.0)
    save(replace(dense, model=chosen), tmp_path / "reduced")
    again = load_checkpoint(tmp_path / "reduced").model
    assert torch.equal(outputs(again, others), outputs(chosen, others))


def test_windows_are_told_and_no_tokens_are_merged() -> None:
    model = checkpoint("windows").model
    told = {row["site"]: row for row in inspection_of_model(model)["sites"]}
    assert told["layers.0.blocks.1.attn"]["width"] == "2 heads, qk 16, v 16, square, 4 windows of 7x7"
    assert told["layers.1.blocks.1.attn"]["width"] == "4 heads, qk 16, v 16, square, 1 window of 7x7"
    assert all(row["reason"] == "" for row in told.values())
    with pytest.raises(BadInput, match="windows are cut and neighbours joined"):
        family_of(model).with_merging(model, Merging(schedule=(2, 2, 2, 2)))
    told = {row["site"]: row["reason"] for row in inspection_of_model(checkpoint("cosines").model)["sites"]}
    assert all(("cosine attention" in reason) == site.endswith("attn") for site, reason in told.items())


def test_what_stays_timms_keeps_its_attention_and_says_why(tmp_path: Path) -> None:
    any_size = checkpoint("windows", dynamic_img_size=True)
    kwargs = FORMS["windows"][1]
    theirs = timm.create_model(V1, **kwargs).eval()
    for model, words in ((any_size.model, "build it for one size"), (theirs, "with_inner_windows")):
        offered = sites_of(model)
        assert [refusal.name for refusal in offered.refused] == [
            f"layers.{stage}.blocks.{block}.attn" for stage in (0, 1) for block in (0, 1)
        ]
        assert all(words in refusal.reason for refusal in offered.refused)
        assert len(offered.every) == 4
    assert not sites_of(with_inner_windows(theirs)).refused
    taken = calibrate(any_size, opened(any_size.model, 16, tmp_path), batch_size=8)
    narrower = reduce(any_size.model, taken, method_from_preset("best", mlp_sparsity=0.5, align_hidden=8)).model
    save(replace(any_size, model=narrower), tmp_path / "reduced")
    again = load_checkpoint(tmp_path / "reduced").model
    for size in (56, 84):
        images = torch.from_numpy(tiny.images(4, 3, size))
        assert error(narrower, any_size.model, images) < 0.2
        assert torch.equal(outputs(again, images), outputs(narrower, images))


def test_weights_for_another_window_are_resampled() -> None:
    """By timm's filter, as its own model does."""
    before = timm.create_model(V1, **FORMS["windows"][1]).eval()
    tiny.enliven(before, 0)
    after = checkpoint("windows", img_size=64, window_size=8).model
    theirs = timm.create_model(V1, **FORMS["windows"][1] | {"img_size": 64, "window_size": 8}).eval()
    adapted = timm_swin.adapted_state(after, before.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.load_state_dict(checkpoint_filter_fn(dict(before.state_dict()), theirs))
    after.load_state_dict(timm_swin.own_state(after, adapted))
    assert error(after, theirs, pixels(after, 2)) < 1e-6


def test_every_swin_of_timm_has_all_its_sites() -> None:
    for name in (
        "swin_tiny_patch4_window7_224",
        "swinv2_base_window12to24_192to384",
    ):
        with torch.device("meta"):
            model = dense_from_architecture(Architecture(name=name))
        offered = sites_of(model)
        assert not offered.refused
        assert len(offered.every) == 2 * family_of(model).depth(model)
        assert {site.qk for site in offered.heads} == {32}
