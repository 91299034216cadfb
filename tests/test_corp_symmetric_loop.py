"""The symmetric closed loop against a recollection by hand, site by site, on float64 activations of the models."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.images import Images
from calib.store import save as save_moments
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import save
from tests import tiny
from tests.command import invoked

RIDGE = 1e-3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return tiny.opened(tmp_path_factory.mktemp("symmetric") / "images.npy", tiny.images(24, seed=4))


def hidden(model: nn.Module, name: str) -> Any:
    """What enters a layer of this model, tokens of all images below each other, in float64."""
    caught: list[Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, given: caught.append(given[0]))
    with torch.inference_mode():
        model(torch.from_numpy(tiny.images(24, seed=4)).double())
    return caught[0].flatten(0, 1).numpy()


def test_it_is_grails_loop(images: Images) -> None:
    """For each MLP in turn: the Gram on the model so far, structured Wanda, W G_:S (G_SS + ridge I)^-1, and on."""
    by_hand: Any = copy.deepcopy(tiny.checkpoint().model).double().eval()
    for index, block in enumerate(by_hand.blocks):
        x = hidden(copy.deepcopy(by_hand), f"blocks.{index}.mlp.fc2")
        second = block.mlp.fc2.weight.detach().numpy()
        gram: Any = sum(np.outer(row, row) for row in x) / len(x)
        score = np.abs(second).sum(0) * np.sqrt(np.diag(gram))
        kept = sorted(np.argsort(-score, kind="stable")[:96].tolist())
        inside = gram[np.ix_(kept, kept)]
        new = second @ gram[:, kept] @ np.linalg.inv(inside + RIDGE * np.diag(inside).mean() * np.eye(96))
        block.mlp.fc1.weight = nn.Parameter(block.mlp.fc1.weight[kept])
        block.mlp.fc1.bias = nn.Parameter(block.mlp.fc1.bias[kept])
        block.mlp.fc2.weight = nn.Parameter(torch.from_numpy(new))
    method = method_from_preset("grail", mlp_sparsity=0.5, align_hidden=8, ridge_rel=RIDGE)
    reduction = reduce_traced(tiny.checkpoint().model, images, method)
    others = torch.from_numpy(tiny.images(6, seed=9))
    with torch.inference_mode():
        expected, found = by_hand(others.double()), reduction.model(others)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert [site.loop for site in reduction.sites] == [None, None]
    assert "each to its dense weights" in reduction.decisions[0]
    # It can tell: the open loop's second MLP is another one.
    moments = calibrate(tiny.checkpoint(), images, batch_size=8)
    with torch.inference_mode():
        alone = reduce(tiny.checkpoint().model, moments, method).model(others)
    assert float((alone - expected).norm() / expected.norm()) > 1e-3


@pytest.mark.parametrize("preset", ["best", "corp", "corp-v1", "grail-fold", "fold", "none"])
def test_every_method_walks_in_it(images: Images, preset: str) -> None:
    method = method_from_preset(preset, mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)
    sites = sites_of(reduce_traced(tiny.checkpoint().model, images, method).model).by_name
    pairs = 48 if "fold" in preset else 24
    assert {(sites[f"blocks.{at}.mlp"].width, sites[f"blocks.{at}.attn.qk"].width) for at in (0, 1)} == {(96, pairs)}


def test_the_command_takes_both_loops(images: Images, tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path / "dense")
    np.save(tmp_path / "images.npy", tiny.images(24, seed=4))
    save_moments(calibrate(tiny.checkpoint(), images, batch_size=8), tmp_path / "m.safetensors")
    words = ["reduce", "--model", tmp_path / "dense", "--moments", tmp_path / "m.safetensors", "--mlp", 0.5]
    words += ["--images", tmp_path / "images.npy", "--align", "mlp=8"]
    for given, said, fitted in (
        (("--closed-loop", "symmetric"), "in which they run, each to its dense weights", False),
        (("--closed-loop",), "in which they run, fitted to", True),
        (("--closed-loop", "asymmetric"), "in which they run, fitted to", True),
    ):
        result = invoked(*words, *given, "-o", tmp_path / "r")
        assert said in " ".join(result.stdout.split())
        lineage = json.loads((tmp_path / "r" / "config.json").read_text())["lineage"]
        assert (lineage["reduction"]["sites"][0]["loop"] is not None) == fitted
    held_out = invoked(*words, "--closed-loop", "symmetric", "--held-out", "h.safetensors", "-o", "r", code=2)
    assert "which held-out moments are not of" in held_out.stderr
