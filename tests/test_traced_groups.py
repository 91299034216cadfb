"""Layers that read groups of channels are repaired by least squares over each group."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from calib.inputs import InputSet
from corp_deploy.families.counting import macs
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import hooked_model, trace_model, tracing
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.input_sets import arrays_for_model
from corp_deploy.traced.models.module import traced_state
from tests import tiny
from tests.traced_examples import images, written_by


class Small(nn.Module):
    """A layer `first` whose channels pass through `between` into the layer `read`."""

    def __init__(self, read: nn.Module, **ways: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_size = (3, 32, 32)
        self.first, self.read, self.last = nn.Conv2d(3, 12, 4, 4), read, nn.LazyLinear(5)
        self.ways = nn.ModuleDict(ways)
        self(torch.zeros(1, 3, 32, 32))

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(self.between(F.relu(self.first(x))))
        return self.last(x.flatten(2).mean(-1) if x.dim() == 4 else x.mean(1))


class Ghosts(Small):
    """Every channel has a ghost that is computed from it alone."""

    def between(self, x: Tensor) -> Tensor:
        return torch.cat((x, F.relu(self.ways["ghost"](x))), 1)


class Windows(Small):
    """Tokens are in windows that are part of the batch."""

    def between(self, x: Tensor) -> Tensor:
        windows: Tensor = x.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 3, 5, 1)
        return windows.reshape(-1, 16, x.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(self.between(F.relu(self.first(x))))
        return self.last(x.reshape(-1, 64, x.shape[-1]).mean(1))


class Readers(Small):
    """One layer reads in groups, and another after an activation of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last((self.read(x) + self.ways["other"](x.tanh())).flatten(2).mean(-1))


class Again(Small):
    """One layer reads the same channels twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last((self.read(x) + self.read(x.tanh())).flatten(2).mean(-1))


class Stream(Small):
    """The channels are a stream, which a layer reads and adds to."""

    def between(self, x: Tensor) -> Tensor:
        return x + F.relu(self.ways["add"](x))


MODELS: Any = {
    "groups": lambda: Small(nn.Conv2d(12, 6, 3, padding=1, groups=3)),
    "pointwise groups": lambda: Small(nn.Conv2d(12, 8, 1, groups=2, bias=False)),
    "ghosts": lambda: Ghosts(nn.Conv2d(24, 6, 3), ghost=nn.Conv2d(12, 12, 3, padding=1, groups=12)),
    "windows": lambda: Windows(nn.Linear(12, 7)),
    "readers": lambda: Readers(nn.Conv2d(12, 6, 3, padding=1, groups=3), other=nn.Conv2d(12, 6, 1)),
    "uses": lambda: Again(nn.Conv2d(12, 6, 1)),
    "stream": lambda: Stream(nn.Conv2d(12, 6, 1), add=nn.Conv2d(12, 12, 3, padding=1)),
}


def make(name: str) -> Any:
    return MODELS[name]()


def entering(model: nn.Module, pixels: Tensor) -> dict[str, Tensor]:
    """Return all inputs of the layers that read the first site, by the names of their weights."""
    site, heard = sites_of(model).every[0], dict[str, Tensor]()

    def hear(name: str, x: Tensor) -> None:
        heard[name] = torch.cat((heard[name], x.double())) if name in heard else x.double()

    handles = [
        each.layer.register_forward_pre_hook(lambda _, inputs, name=each.weight: hear(name, inputs[0]))
        for each in site.readings
    ]
    with torch.no_grad():
        hooked_model(model)(pixels)
    for handle in handles:
        handle.remove()
    return heard


def patches(x: Tensor, layer: nn.Module) -> Tensor:
    """Return the patches that a layer reads, [N, F, T]."""
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2)[..., None]
    assert isinstance(layer, nn.Conv2d), layer
    padding, kernel = layer.padding, layer.kernel_size
    assert not isinstance(padding, str), layer
    columns: Tensor = F.unfold(x, kernel, padding=padding).transpose(1, 2).flatten(0, 1)
    return columns.view(len(columns), x.shape[1], -1)


@pytest.mark.parametrize(("name", "align", "width"), [("groups", 8, 6), ("uses", 4, 8), ("stream", 8, 7)])
def test_channels_are_aligned_across_all_groups_of_a_layer(name: str, align: int, width: int) -> None:
    """Widths are multiples of the groups, or finer if that would leave no choice."""
    model = trace_model(MODELS[name]().eval(), Architecture(name=name, family="module"))
    asked: Any = {"conv_sparsity": 0.4, "residual_sparsity": 0.4, "align_conv": align}
    assert uniform_widths(model, method_from_preset("best", **asked))[sites_of(model).every[0].name] == width


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", MODELS)
def test_half_of_the_channels_are_removed(name: str, tmp_path: Path) -> None:
    checkpoint = written_by("tests.test_traced_groups.make", name=name)
    dense = checkpoint.model
    moments = calibrate(checkpoint, tiny.opened(tmp_path / "images.npy", images(19, seed=1), dense), batch_size=8)
    site = sites_of(dense).every[0]
    halves: Any = {"mlp_sparsity": 0.5, "conv_sparsity": 0.5, "residual_sparsity": 0.5, "ridge_rel": 1e-6}
    reduction = reduce(dense, moments, method_from_preset("best", **halves), widths={site.name: 6})
    cut = traced_state(reduction.model).cut
    assert cut is not None
    kept = cut.kept[site.name]
    assert len(kept) == 6, reduction.notes
    (report,) = reduction.sites
    assert report.error < report.error_uncompensated
    heard, state = entering(dense, torch.from_numpy(images(19, seed=1))), reduction.model.state_dict()
    for reading in {each.weight: each for each in site.readings}.values():
        layer, x_NFT = reading.layer, patches(heard[reading.weight], reading.layer)
        groups = getattr(layer, "groups", 1)
        stays = np.sort(reading.columns_GM[kept].flatten())
        parts = zip(
            x_NFT.chunk(groups, 1),
            layer.weight.detach().double().flatten(2 if layer.weight.dim() > 2 else 1).chunk(groups),
            state[reading.weight].double().chunk(groups),
            np.split(stays, groups),
            strict=True,
        )
        for x_NFT_own, weight, new, own in parts:
            rows = kept if len(new) < len(weight) else slice(None)  # a layer of a stream writes it too
            check_least_squares(x_NFT_own, weight[rows], new, own % x_NFT_own.shape[1])


def check_least_squares(x_NFT: Tensor, weight: Tensor, new: Tensor, kept: Any) -> None:
    """Assert that no weights and bias on the kept inputs come nearer to the dense layer's outputs."""
    dense_NO = x_NFT.flatten(1) @ weight.flatten(1).T
    inputs_NU = x_NFT[:, kept].flatten(1)
    inputs_NU = torch.cat((inputs_NU, torch.ones(len(inputs_NU), 1, dtype=torch.float64)), 1)
    best_NO = inputs_NU @ torch.linalg.lstsq(inputs_NU, dense_NO, driver="gelsd").solution
    given_NO = inputs_NU[:, :-1] @ new.flatten(1).T
    given_NO = given_NO + (dense_NO - given_NO).mean(0)
    least, lost = ((each - dense_NO).square().sum() for each in (best_NO, given_NO))
    assert float(least) <= float(lost) < 1.01 * float(least) + 1e-6 * float(dense_NO.var(0).sum() * len(dense_NO))


# Channels that are shuffled and split in two, with uneven parts left

CHANNELS, SIZE = 12, 8


class Unit(nn.Module):
    """The unit of ShuffleNet V2 (arXiv 1807.11164, figure 3c)."""

    def __init__(self) -> None:
        super().__init__()
        half = CHANNELS // 2
        self.branch = nn.Sequential(nn.Conv2d(half, half, 1), nn.ReLU(), nn.Conv2d(half, half, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        out = torch.cat((left, self.branch(right)), dim=1)
        return out.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_size = (3, SIZE, SIZE)
        self.stem, self.units = nn.Conv2d(3, CHANNELS, 1), nn.Sequential(Unit(), Unit(), Unit())
        self.last, self.head = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Linear(CHANNELS, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.last(self.units(self.stem(images)))).mean((2, 3)))


@pytest.mark.slow("graph")
def test_shuffled_channels_are_removed_consistently(tmp_path: Path) -> None:
    """Every site loses channels, and `best` loses less accuracy than `none`."""
    checkpoint = written_by("tests.test_traced_groups.Shuffled")
    with trusting_code(True):
        dense, images = checkpoint.model, torch.randn(48, 3, SIZE, SIZE)
        moments = calibrate(checkpoint, tiny.opened(tmp_path / "images.npy", images.numpy(), dense), batch_size=8)
        errors = dict[str, float]()
        for preset in ("none", "best"):
            asked = method_from_preset(preset, mlp_sparsity=0.5, conv_sparsity=0.5, align_hidden=1, align_conv=1)
            reduction = reduce(dense, moments, asked)
            assert not [note for note in reduction.notes if "kept" in note], reduction.notes
            assert len(reduction.sites) == len(sites_of(dense).every)
            assert macs(reduction.model) < 0.6 * macs(dense)
            errors[preset] = tiny.relative(tiny.ran(reduction.model, images), tiny.ran(dense, images))
        assert errors["best"] < errors["none"], errors
        save(replace(checkpoint, model=reduction.model), tmp_path / "reduced")
        loaded = load_checkpoint(tmp_path / "reduced").model
    torch.testing.assert_close(tiny.ran(loaded, images), tiny.ran(reduction.model, images))


# Channels that are divided by a mean over them, which the kept ones estimate

D, HIDDEN, TOKENS = 6, 16, 9


class Responding(nn.Module):
    """An MLP with a global response norm on the last or the second axis; each second channel doubles the one before."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.last = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D), last
        self.weight, self.bias = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))
        with torch.no_grad():
            self.fc1.weight[1::2], self.fc1.bias[1::2] = 2 * self.fc1.weight[::2], 2 * self.fc1.bias[::2]
            self.weight[1::2] = self.weight[::2] / 2
        self.inputs = {"x": (TOKENS, D)}

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        h = h if self.last else h.transpose(1, 2)
        norms = h.norm(dim=1 if self.last else 2, keepdim=True)
        shares = norms / (norms.mean(dim=-1 if self.last else 1, keepdim=True) + 1e-6)
        shape = (-1,) if self.last else (-1, 1)
        h = h + torch.addcmul(self.bias.view(shape), self.weight.view(shape), h * shares)
        return x + self.fc2(h if self.last else h.transpose(1, 2))


def responding(last: bool, inputs: Tensor, folder: Path) -> tuple[Responding, Checkpoint, InputSet]:
    """Make the module, its traced checkpoint and a set of these inputs."""
    torch.manual_seed(0)
    plain, architecture = Responding(last=last).eval(), Architecture(name="Responding", family="module")
    model = trace_model(plain, architecture)
    save_file({"x": inputs}, folder / "x.safetensors")
    checkpoint = Checkpoint(model=model, architecture=architecture, lineage={})
    return plain, checkpoint, arrays_for_model(model, folder / "x.safetensors")


@pytest.mark.parametrize("last", [True, False])
def test_redundant_channels_are_removed_without_loss(last: bool, tmp_path: Path) -> None:
    inputs = torch.randn(40, TOKENS, D, generator=torch.Generator().manual_seed(7))
    plain, checkpoint, opened = responding(last, inputs, tmp_path)
    model = checkpoint.model
    torch.testing.assert_close(tracing(model).program.graph(inputs), plain(inputs))
    (site,) = sites_of(model).every
    assert site.width == HIDDEN
    moments, errors = calibrate(checkpoint, opened, batch_size=8), dict[str, float]()
    for preset in ("none", "best"):
        reduction = reduce(model, moments, method_from_preset(preset, mlp_sparsity=0.5, align_hidden=1))
        (report,) = reduction.sites
        assert report.width == HIDDEN // 2
        errors[preset] = tiny.relative(tiny.ran(reduction.model, inputs), tiny.ran(model, inputs))
        means = [value for name, value in reduction.model.state_dict().items() if "mean_weight" in name]
        assert [tuple(each.shape) for each in means] == [(1, HIDDEN // 2)]
        assert bool((means[0] >= 0).all())
    assert errors["best"] < 1e-4 < 1e-2 < errors["none"], errors


def test_closed_loops_keep_the_mean_of_kept_channels(tmp_path: Path) -> None:
    """Plain least squares on so few images would give the mean negative weights."""
    inputs = torch.randn(10, TOKENS, D, generator=torch.Generator().manual_seed(1))
    _, checkpoint, opened = responding(True, inputs, tmp_path)
    weight = checkpoint.model.get_parameter("fc1.weight")
    torch.nn.init.normal_(weight.requires_grad_(False), generator=torch.Generator().manual_seed(2))
    half = method_from_preset("best", mlp_sparsity=0.5, align_hidden=1)
    looped = reduce_traced(checkpoint.model, opened, half, loop=Loop())
    (weight,) = (value for name, value in looped.model.state_dict().items() if name.endswith("mean_weight_0"))
    assert bool((weight >= 0).all())
    assert not [name for name in looped.model.state_dict() if "mean_weight_0_bias" in name]


def test_mean_without_a_division_stays_a_mean() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(-1, keepdim=True)

    model = nn.Sequential(nn.Linear(D, D), Centred(), nn.Linear(D, D)).eval()
    model.inputs = {"input": (TOKENS, D)}  # type: ignore[assignment]
    program = tracing(trace_model(model, Architecture(name="Centred", family="module"))).program
    assert not [node for node in program.nodes if "mean_weight" in str(node.target)]
