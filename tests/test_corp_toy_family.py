"""A family of models that nothing but this file knows goes through calibrate, reduce, export and verify."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.inputs import Inputs
from corp_deploy import load
from corp_deploy.families import family
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.head_attention import HeadAttention
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.modules import replaced
from corp_deploy.families.sites import Sites
from corp_deploy.families.steps import Branch, Passage, Step
from corp_deploy.families.widths import HeadGeometry
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.inputs import images_for_model
from ground.errors import BadInput
from ground.pixels import Normalisation
from ground.ports import LOGITS, OutputPort, Port, image_port
from tests.command import invoked
from tests.tiny import enliven

SHAPE, STRIPS, WIDTH, HEADS = (3, 16, 16), 8, 48, 3


class Rung(nn.Module):
    """x = even(x + spin(x)); x = level(x + shrink(bend(grow(x)))): a post-norm block by no library's names."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.spin = HeadAttention(
            dim=WIDTH, heads=HEADS, qk=size, v=size, scale=size**-0.5, geometry="square", qkv_bias=True, proj_bias=True
        )
        self.even, self.level = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = self.even(x_BNC + self.spin(x_BNC))
        out: Tensor = self.level(x_BNC + self.wide(x_BNC))
        return out


class Ladder(nn.Module):
    """Images in strips of two rows, through rungs, to the mean strip's classes."""

    def __init__(self, rungs: int) -> None:
        super().__init__()
        self.cut = nn.Linear(3 * 16 * 16 // STRIPS, WIDTH)
        self.rungs = nn.ModuleList(Rung() for _ in range(rungs))
        self.name = nn.Linear(WIDTH, 5)

    def embedded(self, images: Tensor) -> Tensor:
        strips = images.reshape(len(images), 3, STRIPS, -1).transpose(1, 2).flatten(2)
        x_BNC: Tensor = self.cut(strips)
        return x_BNC

    def forward(self, images: Tensor) -> Tensor:
        x_BNC = self.embedded(images)
        for rung in self.rungs:
            x_BNC = rung(x_BNC)
        logits: Tensor = self.name(x_BNC.mean(dim=1))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderSpec:
    shape: tuple[int, int, int] = SHAPE
    medium: Literal["images"] = "images"
    ports: tuple[Port, ...] = field(default_factory=lambda: (image_port(SHAPE),))

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(mean=(0.0,), std=(1.0,))

    def as_line(self) -> str:
        return "strips as they come"

    def as_json(self) -> dict[str, Any]:
        return {"strips": STRIPS}

    def transform(self) -> Callable[[Any], Tensor]:
        return torch.as_tensor  # arrays are strips already


def ladder(model: nn.Module) -> Ladder:
    assert isinstance(model, Ladder)
    return model


class LadderFamily:
    NAME = "ladder"
    UNMERGEABLE = "strips are not merged"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, Ladder)

    def build(self, architecture: Architecture) -> nn.Module:
        return Ladder(**architecture.kwargs).eval()

    def sites(self, model: nn.Module) -> Sites:
        channels, heads = [], []
        for index, rung in enumerate(ladder(model).rungs):
            assert isinstance(rung, Rung)
            wide, spin = f"rungs.{index}.wide", f"rungs.{index}.spin"
            first, _, last = rung.wide
            assert isinstance(first, nn.Linear)
            assert isinstance(last, nn.Linear)
            channels.append(
                ChannelSite(name=wide, first=first, last=last, first_name=f"{wide}.0", last_name=f"{wide}.2")
            )
            heads.append(
                HeadSite(
                    name=spin, module=rung.spin, first=rung.spin.qkv, last=rung.spin.proj, heads=HEADS,
                    qk=rung.spin.qk, v=rung.spin.v, scale=rung.spin.scale, q_norm=rung.spin.q_norm,
                    k_norm=rung.spin.k_norm, geometry=rung.spin.geometry,
                )
            )  # fmt: skip
        return Sites(every=(*channels, *heads), refused=())

    def steps(self, model: nn.Module, *, read: Tensor | None = None) -> Iterator[Step]:
        for index, rung in enumerate(ladder(model).rungs):
            assert isinstance(rung, Rung)
            for name, layer, norm in (("spin", rung.spin, rung.even), ("wide", rung.wide, rung.level)):
                yield Branch(name=f"rungs.{index}.{name}", norm=nn.Identity(), layer=layer, scale_C=None)
                yield Passage(module=norm)

    def embedded(self, model: nn.Module, inputs: Inputs) -> Tensor:
        assert isinstance(inputs, Tensor)
        return ladder(model).embedded(inputs)

    def normed(self, model: nn.Module, x_BNC: Tensor) -> Tensor:
        return x_BNC

    def finished(self, model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor:
        logits: Tensor = ladder(model).name(x_BNC.mean(dim=1))
        return logits

    def token_kinds(self, model: nn.Module) -> tuple[str, ...]:
        return ("strip",) * STRIPS

    def grid(self, model: nn.Module, layer: str) -> None:
        pass

    def depth(self, model: nn.Module) -> int:
        return len(ladder(model).rungs)

    def input_spec(self, model: nn.Module) -> LadderSpec:
        return LadderSpec()

    def output_ports(self, model: nn.Module) -> tuple[OutputPort, ...]:
        return (LOGITS,)

    def classes(self, model: nn.Module) -> int:
        return 5

    def exportable(self, model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
        plain = {site.name: site.plain(geometry) for site in self.sites(model).heads}
        return replaced(model, plain).eval().requires_grad_(False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a dense ladder, images to calibrate on and others to judge by."""
    monkeypatch.setattr(family, "_FAMILIES", dict(family._FAMILIES))
    family.register(LadderFamily())
    architecture = Architecture(name="two rungs", kwargs={"rungs": 2}, family="ladder")
    model = LadderFamily().build(architecture)
    enliven(model, 0)
    save(Checkpoint(model=model, architecture=architecture, lineage={}), tmp_path / "dense")
    generator = torch.Generator().manual_seed(1)
    for name, count in (("calibration", 96), ("held-out", 24)):
        np.save(tmp_path / f"{name}.npy", torch.randn(count, *SHAPE, generator=generator).numpy())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def relative_error(outputs: Tensor, expected: Tensor) -> float:
    return float((outputs - expected).norm() / expected.norm())


@pytest.mark.slow("graph")
def test_a_family_of_its_own_goes_the_whole_way(home: Path) -> None:
    sites = json.loads(invoked("inspect", "--model", "dense", "--json").stdout)["sites"]
    assert [site["site"] for site in sites] == ["rungs.0.spin", "rungs.0.wide", "rungs.1.spin", "rungs.1.wide"]
    invoked("calibrate", "--model", "dense", "--images", "calibration.npy", "-o", "m.safetensors", "-q")
    options = ("--moments", "m.safetensors", "--mlp", 0.5, "--attn", 0.5, "--align", "mlp=8,head=8", "-q")
    invoked("reduce", "--model", "dense", *options, "-o", "reduced")
    invoked("reduce", "--model", "dense", *options, "--preset", "none", "-o", "unrepaired")
    images = torch.from_numpy(np.load("held-out.npy"))
    with torch.inference_mode():
        dense, reduced, unrepaired = (load(name)(images) for name in ("dense", "reduced", "unrepaired"))
    assert relative_error(reduced, dense) < 0.8 * relative_error(unrepaired, dense)
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
    looped = reduce_closed_loop(model, images_for_model(model, Path("calibration.npy")), method)
    assert {site.width for site in LadderFamily().sites(looped.model).channels} == {2 * WIDTH}
    assert all(report.loop is not None for report in looped.sites if report.part != "qk")


def test_a_family_that_is_not_there_is_named(home: Path) -> None:
    family._FAMILIES.pop("ladder")
    with pytest.raises(BadInput, match="family 'ladder': expected one of traced, timm"):
        load("dense")
