"""Closed loops of modules that are run whole: order, fits beside lstsq by hand, gain over an open loop, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import corp_deploy
from calib.images import Images
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.named_loop import reduce_by_closed_loop, reduce_by_symmetric_loop, reduce_in_order
from ground.errors import BadInput
from tests import tiny
from tests.command import invoked
from tests.test_corp_named_sites import SOURCE, checkpoint, named, net, relative

HALF: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
RUN = ["layers.0.mix", "layers.0.ffn", "layers.1.mix", "layers.1.ffn"]


def opened(model: nn.Module, path: Path, count: int = 128) -> Images:
    return tiny.opened(path / "images.npy", tiny.images(count), model)


def outputs(model: nn.Module, seed: int = 9, count: int = 64) -> Tensor:
    with torch.inference_mode():
        answer: Tensor = model(torch.from_numpy(tiny.images(count, seed=seed)))
    return answer


def heard(model: nn.Module, module: str, images: Tensor, *, entering: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What enters a module, or what it gives, [rows, channels]."""
    rows: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        rows.append(inputs[0] if entering else out)

    handle = model.get_submodule(module).register_forward_hook(hook)
    with torch.inference_mode():
        model(images)
    handle.remove()
    return rows[0].flatten(0, -2).double().numpy()


def test_each_site_is_fitted_to_its_dense_results_on_the_reduced_modules_own_stream(tmp_path: Path) -> None:
    model = named(net())
    inputs = opened(model, tmp_path)
    told: list[int] = []
    reduction = reduce_by_closed_loop(model, inputs, method_from_preset("best", **HALF), done=told.append)
    assert told == [1, 2, 3, 4]
    assert "closed loop over 4 sites in the order in which they run" in reduction.said[0]
    assert list(dict.fromkeys(site.site for site in reduction.sites)) == RUN, "not the order of their names"
    opens = reduce(model, calibrate(checkpoint(model), inputs, batch_size=32), method_from_preset("best", **HALF)).model

    images = torch.from_numpy(tiny.images(128))
    fitted = torch.arange(128) % 4 != 3
    for name, last in (("layers.1.ffn", "layers.1.ffn.2"), ("layers.1.mix", "layers.1.mix.proj")):
        target = heard(model, name, images[fitted], entering=False)
        errors = {}
        for way, each in (("closed", reduction.model), ("open", opens)):
            given = heard(each, name, images[fitted], entering=False)
            errors[way] = float(np.linalg.norm(given - target) / np.linalg.norm(target))
        entering = heard(reduction.model, last, images[fitted], entering=True)
        ones = np.concatenate([entering, np.ones((len(entering), 1))], axis=1)
        best = ones @ np.linalg.lstsq(ones, target, rcond=None)[0]
        optimum = float(np.linalg.norm(best - target) / np.linalg.norm(target))
        assert optimum <= errors["closed"] * (1 + 1e-6) < errors["open"], (name, optimum, errors)
        assert errors["closed"] < 1.25 * optimum, (name, optimum, errors)


def test_a_closed_loop_errs_less_at_the_output_than_an_open_one(tmp_path: Path) -> None:
    model = named(net())
    inputs = opened(model, tmp_path, 256)
    method, dense = method_from_preset("best", **HALF), outputs(model)
    moments = calibrate(checkpoint(model), inputs, batch_size=32)
    ways = {
        "open": reduce(model, moments, method).model,
        "symmetric": reduce_by_symmetric_loop(model, inputs, method).model,
        "closed": reduce_by_closed_loop(model, inputs, method).model,
        "halves": reduce_by_closed_loop(model, inputs, method, loop=Loop(half_ids=inputs.ids[::2])).model,
    }
    errors = {way: relative(outputs(each), dense) for way, each in ways.items()}
    assert max(errors["closed"], errors["halves"]) < errors["open"], errors
    assert errors["symmetric"] < 1.2 * errors["open"], errors
    widths = {"layers.0.ffn": 48, "layers.1.ffn": 96}
    part = reduce_by_closed_loop(model, inputs, method, widths=widths).model
    assert [site.size for site in sites_of(part).every][:2] == [48, 96]


def test_planted_redundancy_is_removed_exactly_in_a_closed_loop(tmp_path: Path) -> None:
    model = net()
    with torch.no_grad():
        for layer in model.get_submodule("layers").children():
            first: Any = layer.get_submodule("ffn.0")
            first.weight[48:], first.bias[48:] = first.weight[:48].clone(), first.bias[:48].clone()
    ours = named(model)
    method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.0, align_hidden=8)
    reduced = reduce_by_closed_loop(ours, opened(ours, tmp_path), method).model
    assert relative(outputs(reduced), outputs(model)) < 1e-3


class Turning(nn.Module):
    """Runs its two MLPs in an order that the image decides."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 8, stride=8)
        self.one, self.other = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.cut(images).flatten(2).mT
        for layer in (self.one, self.other) if float(images[0, 0, 0, 0]) > 0 else (self.other, self.one):
            x = x + layer(x)
        return x.mean(dim=1)


class Normed(nn.Module):
    """An MLP that has its norm and its sum inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.last(torch.relu(self.first(self.norm(x))))
        return out


class Around(nn.Module):
    """Some layer of tokens, or of maps with channels last."""

    def __init__(self, layer: nn.Module, *, maps: bool) -> None:
        super().__init__()
        self.cut, self.layer, self.maps = nn.Conv2d(3, 16, 8, stride=8), layer, maps

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).permute(0, 2, 3, 1)
        out: Tensor = self.layer(x if self.maps else x.flatten(1, 2))
        return out.flatten(1, -2).mean(dim=1)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


REFUSED: dict[str, tuple[nn.Module, dict[str, tuple[str, ...]], str]] = {
    "order": (
        Turning(),
        {"one": ("0", "2"), "other": ("0", "2")},
        r"what runs first isn't the same for all images, so sites can't be reduced in order: leave --closed-loop away",
    ),
    "a norm inside": (
        Around(Normed(), maps=False),
        {"layer": ("first", "last")},
        r"layer does more than its linear layers and what lies between them \(a norm or a sum inside it\)",
    ),
    "maps": (
        Around(plain(), maps=True),
        {"layer": ("0", "2")},
        r"layer takes \[16, 4, 4, 16\] for 16 images, expected one tensor \[images, tokens, channels\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_followed_is_refused(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, mlps, words = REFUSED[case]
    model = corp_deploy.sites(module.eval(), inputs=(3, 32, 32), mlps=mlps, output="embedding")
    pixels = tiny.images(32)
    pixels[:, 0, 0, 0] = np.where(np.arange(32) < 16, 1.0, -1.0)
    inputs = tiny.opened(tmp_path / "images.npy", pixels, model)
    method = method_from_preset("best", mlp_sparsity=0.5, align_hidden=8)
    with pytest.raises(BadInput, match=words):
        reduce_in_order(model, inputs, method, batch_size=16, loop=Loop())
    moments = calibrate(checkpoint(model), inputs, batch_size=16)
    reduce(model, moments, method)


@pytest.mark.slow("models")
def test_the_command_takes_closed_loops_of_own_modules_and_no_reads(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    np.save(tmp_path / "images.npy", tiny.images(48))
    model = ("--model", f"module:{tmp_path / 'net.py'}:build", "--trust-code")
    moments, images = tmp_path / "m.safetensors", ("--images", tmp_path / "images.npy")
    invoked("calibrate", *model, *images, "-o", moments)
    asked = ("reduce", *model, "--moments", moments, *images, "--macs", 0.8, "--align", "mlp=8,head=8", "--closed-loop")
    result = invoked(*asked, "-o", tmp_path / "reduced")
    assert "sites in the order in which they run, fitted to what each layer gives" in " ".join(result.output.split())
    said = invoked(*asked, "--reads", "pooled", "-o", tmp_path / "x", code=2).stderr
    assert "isn't known of a module that is run whole; drop --reads" in said
    said = invoked(*asked, "--polish", "block", "-o", tmp_path / "x", code=2).stderr
    assert "stand in blocks that can't be taken apart; polish model, or leave --polish away" in " ".join(said.split())
