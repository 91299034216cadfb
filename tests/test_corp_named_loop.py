"""Loops of modules whose sites are named: what they gain, and that nothing else is touched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import corp_deploy
from calib.images import Images
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from tests import tiny
from tests.command import invoked
from tests.test_corp_named_sites import SOURCE, checkpoint, named, net, relative

HALF: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}


def opened(model: nn.Module, path: Path, count: int = 128) -> Images:
    return tiny.opened(path / "images.npy", tiny.images(count), model)


def outputs(model: nn.Module, seed: int = 9, count: int = 64) -> Tensor:
    return tiny.ran(model, tiny.images(count, seed=seed))


def test_a_closed_loop_errs_less_at_the_output_than_an_open_one(tmp_path: Path) -> None:
    model = named(net())
    inputs = opened(model, tmp_path, 256)
    method, dense = method_from_preset("best", **HALF), outputs(model)
    moments = calibrate(checkpoint(model), inputs, batch_size=32)
    ways = {
        "open": reduce(model, moments, method).model,
        "symmetric": reduce_traced(model, inputs, method).model,
        "closed": reduce_traced(model, inputs, method, loop=Loop()).model,
        "halves": reduce_traced(model, inputs, method, loop=Loop(half_ids=inputs.ids[::2])).model,
    }
    errors = {way: relative(outputs(each), dense) for way, each in ways.items()}
    assert max(errors["closed"], errors["halves"]) < errors["open"], errors
    assert errors["symmetric"] < 1.2 * errors["open"], errors
    widths = {"layers.0.ffn": 48, "layers.1.ffn": 96}
    part = reduce_traced(model, inputs, method, widths=widths, loop=Loop()).model
    assert {name: site.size for name, site in sites_of(part).by_name.items() if name in widths} == widths
    told: list[tuple[int, int]] = []
    alone = named(net(), mlps={"layers.1.ffn": ("0", "2")}, attentions={})
    one = reduce_traced(alone, inputs, method, on_progress=lambda *each: told.append(each), loop=Loop())
    assert [report.site for report in one.sites] == ["layers.1.ffn"]
    assert told == [(1, 1)]
    kept = {name for name, each in one.model.state_dict().items() if torch.equal(each, alone.state_dict()[name])}
    assert {name for name in alone.state_dict() if name not in kept} == {
        f"layers.1.ffn.{each}" for each in ("0.weight", "0.bias", "2.weight", "2.bias")
    }


@pytest.mark.slow("models")
def test_the_command_has_every_lever_for_own_modules(tmp_path: Path) -> None:
    """Loops, tokens that are read and that merge, polish by blocks."""
    (tmp_path / "net.py").write_text(SOURCE)
    np.save(tmp_path / "images.npy", tiny.images(48))
    model = ("--model", f"module:{tmp_path / 'net.py'}:build", "--trust-code")
    moments, images = tmp_path / "m.safetensors", ("--images", tmp_path / "images.npy")
    invoked("calibrate", *model, *images, "-o", moments)
    asked = ("reduce", *model, "--moments", moments, *images, "--align", "mlp=8,head=8")
    result = invoked(*asked, "--macs", 0.8, "--closed-loop", "--reads", "pooled", "-o", tmp_path / "looped")
    assert "sites in the order in which they run, fitted to the dense model's streams" in " ".join(
        result.output.split()
    )
    result = invoked(*asked, "--mlp", 0.5, "--merge-tokens", 2, "--polish", "block", "-o", tmp_path / "merged")
    assert "polished in 2 blocks" in " ".join(result.output.split())
    merged = corp_deploy.load(tmp_path / "merged", trust_code=True)
    assert traced_model.merging_of(merged) is not None
    assert [site.size for site in sites_of(merged).every if site.name.endswith("ffn")] == [48, 48]
