"""A family of models that nothing but this file knows goes through calibrate, reduce, export and verify."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corp_deploy import load
from corp_deploy.families import family
from corp_deploy.families.architecture import Architecture
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.inputs import images_for_model
from tests import tiny
from tests.command import invoked
from tests.refusals import rejects
from tests.tiny import enliven

SHAPE, STRIPS, WIDTH, HEADS = (3, 16, 16), 8, 48, 3


class Spin(nn.Module):
    """Attention of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.tell, self.say, self.sum = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x_BNC: Tensor) -> Tensor:
        q, k, v = (each(x_BNC).unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.ask, self.tell, self.say))
        given_BHND = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.sum(given_BHND.transpose(1, 2).flatten(2))
        return out


class Rung(nn.Module):
    """x = even(x + spin(x)); x = level(x + shrink(bend(grow(x)))): a post-norm block by no library's names."""

    def __init__(self) -> None:
        super().__init__()
        self.spin, self.even, self.level = Spin(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = self.even(x_BNC + self.spin(x_BNC))
        out: Tensor = self.level(x_BNC + self.wide(x_BNC))
        return out


class Ladder(nn.Module):
    """Images in strips of two rows, through rungs, to the mean strip's classes."""

    def __init__(self, rungs: int) -> None:
        super().__init__()
        self.input_size = SHAPE
        self.cut = nn.Linear(3 * 16 * 16 // STRIPS, WIDTH)
        self.rungs = nn.ModuleList(Rung() for _ in range(rungs))
        self.name = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x_BNC = self.cut(images.reshape(len(images), 3, STRIPS, -1).transpose(1, 2).flatten(2))
        for rung in self.rungs:
            x_BNC = rung(x_BNC)
        logits: Tensor = self.name(x_BNC.mean(dim=1))
        return logits


def build(architecture: Architecture) -> nn.Module:
    return Ladder(**architecture.kwargs).eval()


SITES = [f"rungs.{number}.{part}" for number in (0, 1) for part in ("spin.qk", "spin.v", "wide")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a dense ladder, images to calibrate on and others to judge by."""
    monkeypatch.setattr(family, "_BUILDERS", {**family._BUILDERS, "ladder": build})
    architecture = Architecture(name="two rungs", kwargs={"rungs": 2}, family="ladder")
    model = family.dense_model(architecture)
    enliven(model, 0)
    save(Checkpoint(model=model, architecture=architecture, lineage={}), tmp_path / "dense")
    generator = torch.Generator().manual_seed(1)
    for name, count in (("calibration", 96), ("held-out", 24)):
        np.save(tmp_path / f"{name}.npy", torch.randn(count, *SHAPE, generator=generator).numpy())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow("graph")
def test_a_family_of_its_own_goes_the_whole_way(home: Path) -> None:
    sites = json.loads(invoked("inspect", "--model", "dense", "--json").stdout)["sites"]
    assert [site["site"] for site in sites] == SITES
    invoked("calibrate", "--model", "dense", "--images", "calibration.npy", "-o", "m.safetensors", "-q")
    options = ("--moments", "m.safetensors", "--mlp", 0.5, "--attn", 0.5, "--align", "mlp=8,head=8", "-q")
    invoked("reduce", "--model", "dense", *options, "-o", "reduced")
    invoked("reduce", "--model", "dense", *options, "--preset", "none", "-o", "unrepaired")
    images = torch.from_numpy(np.load("held-out.npy"))
    with torch.inference_mode():
        dense, reduced, unrepaired = (load(name)(images) for name in ("dense", "reduced", "unrepaired"))
    assert tiny.relative(reduced, dense) < 0.8 * tiny.relative(unrepaired, dense)
    invoked("export", "--model", "reduced", "--precision", "fp32,fp16", "-o", "reduced/model.onnx", "-q")
    chain = ("dense", "reduced", "reduced/model.onnx", "reduced/model.fp16.onnx")
    invoked(
        "verify", *chain, "--images", "held-out.npy", "--batch", "1,4", "--max-error", 2.0, "-o", "parity.json", "-q"
    )
    links = {link["name"]: link for link in json.loads((home / "parity.json").read_text())["links"]}
    assert {link["status"] for link in links.values()} == {"PASS"}
    assert links["reduced-onnx-fp32"]["measures"]["relative_error"] < 1e-4


def test_a_budget_and_the_closed_loop_know_it_too(home: Path) -> None:
    invoked("calibrate", "--model", "dense", "--images", "calibration.npy", "-o", "m.safetensors", "-q")
    options = ("--moments", "m.safetensors", "--images", "calibration.npy", "--align", "mlp=8,head=8", "-q")
    invoked("reduce", "--model", "dense", *options, "--macs", 0.7, "-o", "budget")
    dense, budget = (
        json.loads(invoked("inspect", "--model", name, "--json").stdout)["macs"] for name in ("dense", "budget")
    )
    assert 0.6 < budget / dense <= 0.7
    model = load("dense")
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=8)
    looped = reduce_traced(model, images_for_model(model, Path("calibration.npy")), method, loop=Loop())
    widths = {site.name: site.width for site in family.sites_of(looped.model).every}
    assert widths == {name: 2 * WIDTH if "wide" in name else WIDTH // 2 if "qk" in name else WIDTH for name in SITES}
    assert all(report.loop is not None for report in looped.sites if report.part != "qk")


def test_a_family_that_is_not_there_is_named(home: Path) -> None:
    family._BUILDERS.pop("ladder")
    rejects("family 'ladder': expected one of bert, timm", load, "dense")
