"""Models with a site that can't be reduced whole, and with a cost that no site owns: budgets, notes, the numbers."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn

from calib.images import Images
from calib.moments import HeadMoments, Moments
from corp_deploy.cli import main
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.head_attention import HeadAttention
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.families.site import Currency
from corp_deploy.families.widths import EMPTY_HEADS, HeadWidths
from corp_deploy.planning.budget import allocate, dense_cost
from corp_deploy.planning.curves import cost_curves, eliminations
from corp_deploy.planning.plan import choose_heads
from corp_deploy.planning.probe import Probe
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import facts_of_onnx, metadata_of_checkpoint
from ground.errors import BadInput
from tests import tiny

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7, "img_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "q/k norm": ("vit_tiny_patch16_224", {**SMALL, "patch_size": 8, "qk_norm": True}),
    "swiglu": ("aimv2_large_patch14_224", {**SMALL, "patch_size": 8}),
    "no biases": ("vit_tiny_patch16_224", {**SMALL, "patch_size": 8, "qkv_bias": False, "proj_bias": False}),
}


@cache
def checkpoint(family: str) -> Checkpoint:
    name, kwargs = MODELS[family]
    torch.manual_seed(0)
    model = tiny.timm_model(name, **kwargs).requires_grad_(False)
    tiny.enliven(model, 0)
    return Checkpoint(model=model, architecture=Architecture(name=name, kwargs=kwargs), lineage={})


@cache
def opened(family: str) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", tiny.images(24), checkpoint(family).model)


def pixels(family: str) -> Tensor:
    return next(iter(opened(family).batches(24)))


@cache
def moments(family: str) -> Moments:
    return calibrate(checkpoint(family), opened(family), batch_size=8)


def best(**changes: Any) -> Method:
    return method_from_preset("best", **{"align_hidden": 8, "align_head": 8, **changes})


def probe(family: str, method: Method) -> Probe:
    model, taken = checkpoint(family).model, moments(family)
    known = eliminations(model, taken, method)
    return Probe(model=model, moments=taken, method=method, inputs=pixels(family)[:8], eliminations=known)


def relative_error(candidate: nn.Module, family: str) -> float:
    with torch.inference_mode():
        found, wanted = candidate(pixels(family)).double(), checkpoint(family).model(pixels(family)).double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("currency", ["macs", "params"])
@pytest.mark.parametrize(("family", "share"), [("q/k norm", 0.7), ("swiglu", 0.95), ("no biases", 0.6)])
def test_a_budget_holds_for_the_counted_number(family: str, share: float, currency: Currency) -> None:
    asked = probe(family, best())
    dense = dense_cost(asked.model, currency)
    found = allocate(list(cost_curves(asked, currency)), dense, share)
    reduced = reduce(asked.model, asked.moments, asked.method, widths=found.widths, eliminations=asked.eliminations)
    counted = macs(reduced.model) if currency == "macs" else parameters(reduced.model)
    assert counted / dense <= found.share * (1.0 + 1e-9) <= share
    assert counted < dense


@pytest.mark.parametrize("geometry", ["padded", "square", "ragged"])
def test_a_site_that_keeps_q_and_k_offers_its_values(geometry: Any) -> None:
    asked = probe("q/k norm", best(geometry=geometry))
    found = {offer.site: offer for offer in cost_curves(asked, "macs")}
    offer = found["blocks.1.attn"]
    assert offer.widths == (EMPTY_HEADS, HeadWidths(qk=16, v=8), HeadWidths(qk=16, v=16))
    assert offer.costs[0] < offer.costs[1] < offer.costs[2] == offer.cost_now
    assert offer.errors[0] > offer.errors[1] > offer.errors[2] == 0.0
    narrow = {name: each.widths[1] for name, each in found.items()}
    reduction = reduce(asked.model, asked.moments, asked.method, widths=narrow, eliminations=asked.eliminations)
    assert [(site.part, site.width) for site in reduction.sites if site.site == "blocks.1.attn"] == [("v", 8)]
    assert reduction.notes[1].startswith("blocks.1.attn keeps Q/K: q_norm / k_norm stand")
    assert reduction.notes[1].endswith("8 of 16 value dimensions a head stay")
    module = reduction.model.get_submodule("blocks.1.attn")
    assert isinstance(module, HeadAttention)
    assert module.geometry == ("ragged" if geometry == "ragged" else "padded")
    rows = slice(0, 2 * 3 * 16)
    dense = asked.model.get_submodule("blocks.1.attn")
    assert torch.equal(module.qkv.weight[rows], dense.qkv.weight[rows])  # type: ignore[union-attr, index]


def test_values_alone_are_the_best_of_their_rank() -> None:
    """One site, its values at half their width: the output's error is that of an independent least squares fit."""
    model, name = checkpoint("q/k norm").model, "blocks.0.attn"
    reduction = reduce(model, moments("q/k norm"), best(geometry="square"), widths={name: HeadWidths(qk=16, v=8)})
    site = moments("q/k norm").sites[name]
    assert isinstance(site, HeadMoments)
    caught: list[Tensor] = []
    hooks = [
        each.get_submodule(f"{name}.proj").register_forward_hook(lambda _, given, out: caught.extend((given[0], out)))
        for each in (reduction.model, model)
    ]
    with torch.inference_mode():
        reduction.model(pixels("q/k norm")), model(pixels("q/k norm"))
    for hook in hooks:
        hook.remove()
    inputs_NK, wanted_NO = caught[0].double().flatten(0, 1), caught[3].double().flatten(0, 1)
    with_one_NK = torch.cat((inputs_NK, torch.ones_like(inputs_NK[:, :1])), dim=1)
    fitted_NO = with_one_NK @ torch.linalg.lstsq(with_one_NK, wanted_NO).solution
    least = float((fitted_NO - wanted_NO).square().sum(1).mean())
    assert reduction.sites[0].error == pytest.approx(least, rel=2e-2)
    assert float((caught[1].double().flatten(0, 1) - wanted_NO).square().sum(1).mean()) == pytest.approx(
        least, rel=2e-2
    )
    assert reduction.sites[0].error < reduction.sites[0].error_uncompensated


def test_uniform_square_heads_reduce_the_values_and_padded_ones_say_why_not() -> None:
    model, taken = checkpoint("q/k norm").model, moments("q/k norm")
    square = reduce(model, taken, best(attention_sparsity=0.5, geometry="square"))
    assert [(part.qk, part.v) for part in vit.sites(square.model).heads] == [(16, 8), (16, 8)]
    padded = reduce(model, taken, best(attention_sparsity=0.5))
    assert [(part.qk, part.v) for part in vit.sites(padded.model).heads] == [(16, 16), (16, 16)]
    assert padded.sites == ()
    assert all(note.endswith("--heads square reduces them") for note in padded.notes)
    looped = reduce_closed_loop(model, opened("q/k norm"), best(attention_sparsity=0.5, geometry="square"))
    assert relative_error(looped.model, "q/k norm") < relative_error(square.model, "q/k norm")


def test_a_model_with_narrow_values_alone_comes_back(tmp_path: Path) -> None:
    dense = checkpoint("q/k norm")
    reduction = reduce(dense.model, moments("q/k norm"), best(attention_sparsity=0.5, geometry="square"))
    save(replace(dense, model=reduction.model), tmp_path)
    again = load_checkpoint(tmp_path).model
    with torch.inference_mode():
        assert torch.equal(again(pixels("q/k norm")), reduction.model(pixels("q/k norm")))
    assert macs(again) == macs(reduction.model)


def test_heads_are_weighed_where_some_keep_q_and_k() -> None:
    asked = probe("q/k norm", best(mlp_sparsity=0.5, attention_sparsity=0.5))
    taken = choose_heads(asked, None)
    uniform = reduce(asked.model, asked.moments, asked.method).model
    dense = macs(asked.model)
    assert taken.allocated.share <= macs(uniform) / dense
    reduced = reduce(asked.model, asked.moments, taken.method, widths=taken.allocated.widths).model
    assert macs(reduced) <= taken.allocated.share * dense * (1.0 + 1e-9)


def test_weighing_heads_takes_values_where_only_values_can_go() -> None:
    asked = probe("q/k norm", best(attention_sparsity=0.5))
    taken = choose_heads(asked, None)
    square = reduce(asked.model, asked.moments, replace(asked.method, geometry="square")).model
    assert taken.allocated.share <= macs(square) / macs(asked.model) < 1.0


@pytest.mark.slow("graph")
def test_root_mean_square_norms_export_in_half_precision_and_the_opset_is_said(tmp_path: Path) -> None:
    save(checkpoint("swiglu"), tmp_path / "dense")
    words = ["export", "--model", str(tmp_path / "dense"), "--precision", "fp16", "-o", str(tmp_path / "m.onnx")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    facts = facts_of_onnx(tmp_path / "m.onnx")
    assert f"fp16, opset {facts.opset}" in " ".join(done.stdout.split())
    assert facts.macs == macs(checkpoint("swiglu").model)


def test_a_stem_without_a_projection_is_described() -> None:
    kwargs = {"depth": 1, "num_classes": 7}
    model = tiny.timm_model("vit_base_mci_224", **kwargs)
    named = Architecture(name="vit_base_mci_224", kwargs=kwargs)
    carried = metadata_of_checkpoint(Checkpoint(model=model, architecture=named, lineage={}))
    assert carried["corp_deploy.depth"] == "1"
    assert int(carried["corp_deploy.macs"]) == macs(model)


@pytest.mark.parametrize(("channels", "words"), [(1, "1 channel;"), (4, "4 channels;")])
def test_a_folder_for_a_model_that_takes_no_rgb_is_refused_once(tmp_path: Path, channels: int, words: str) -> None:
    model = tiny.checkpoint(in_chans=channels).model
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    with pytest.raises(BadInput) as refused:
        images_for_model(model, folder)
    assert f"folders and tar shards give RGB, the model takes {words} give .npy, .npz" in str(refused.value)
    np.save(tmp_path / "images.npy", np.zeros((2, channels, 32, 32), np.float32))
    assert images_for_model(model, tmp_path / "images.npy").count == 2


def test_metadata_counts_blocks_and_macs() -> None:
    carried = metadata_of_checkpoint(checkpoint("swiglu"))
    assert carried["corp_deploy.depth"] == "2"
    assert int(carried["corp_deploy.macs"]) == macs(checkpoint("swiglu").model)
