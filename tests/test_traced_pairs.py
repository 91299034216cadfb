"""Queries and keys of traced models, however heads stand and whatever stands between them and their layers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.families.family import listened, sites_of
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.traced.models.pairs import TracedPairs
from tests import tiny, traced_models
from tests.traced_examples import written_by

D, HEADS, TOKENS = traced_models.D, traced_models.HEADS, traced_models.TOKENS


class Windowed(nn.Module):
    """Tokens see those of their window alone, windows standing with the batch; `tokens_first`: [B,N,H,D]."""

    def __init__(self, windows: int = 3, *, tokens_first: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.windows, self.tokens_first = windows, tokens_first

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x.reshape(B * self.windows, N // self.windows, C)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (self.arranged(each) for each in qkv.unbind(2))
        if self.tokens_first:
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
            mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        else:
            mixed = (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2)
        return self.out(mixed.reshape(B, N, C))

    def arranged(self, x: Tensor) -> Tensor:
        return x if self.tokens_first else x.transpose(1, 2)


class Mapped(nn.Module):
    """Queries and keys by convolutions with norms by channel, heads as [B H,D,N]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Sequential(nn.Conv2d(D, D, 1, bias=False), nn.BatchNorm2d(D)) for _ in range(2))
        self.v, self.out = nn.Linear(D, D), nn.Conv2d(D, D, 1)
        for norm in (self.q[1], self.k[1]):
            assert isinstance(norm, nn.BatchNorm2d)
            norm.running_mean, norm.running_var = torch.randn(D), torch.rand(D) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        maps = x.transpose(1, 2).reshape(B, C, 2, N // 2)
        q, k = (each(maps).reshape(B * HEADS, C // HEADS, N) for each in (self.q, self.k))
        v = self.v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = torch.bmm(q.transpose(1, 2), k).view(B, HEADS, N, N).softmax(-1) @ v
        return self.out(mixed.permute(0, 1, 3, 2).reshape(B, C, 2, N // 2)).flatten(2).mT


class Placed(traced_models.Relative):
    """With a table of places added to the queries; `bent`: something else than that."""

    def __init__(self, *, bent: bool = False) -> None:
        super().__init__()
        self.places, self.bent = nn.Parameter(torch.randn(TOKENS, D // HEADS)), bent

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        q = torch.tanh(q) if self.bent else q + self.places
        return self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(B, N, C))


class Sequence(nn.Module):
    """torch's own; tokens in front of the batch, or behind it."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, HEADS, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attn.batch_first else x.transpose(0, 1)
        given: Tensor = self.attn(x, x, x, need_weights=False)[0]
        return given if self.attn.batch_first else given.transpose(0, 1)


class SharedTurned(traced_models.Rotary):
    """Four heads of queries that positions turn, two of keys; interleaved planes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(D, 32), nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (self.turned_in_pairs(each) for each in (q, k))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def turned_in_pairs(self, x: Tensor) -> Tensor:
        cos, sin = (each[:, :4].repeat_interleave(2, -1) for each in (self.cos, self.sin))
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


class OfImages(nn.Module):
    """A module of tokens as one of images."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input_size = (3, 8, 12)
        self.stem, self.body, self.head = nn.Conv2d(3, D, 4, 4), MODELS[name][0](), nn.Linear(D, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return self.head((x + self.body(x)).mean(1))


MODELS: Mapping[str, tuple[Any, str, tuple[int, int]]] = {
    "einsum": (traced_models.EinsumAttention, "free", (2, 8)), "relative": (traced_models.Relative, "free", (2, 8)),
    "torch's": (lambda: Sequence(batch_first=True), "free", (2, 8)),
    "torch's, tokens in front": (Sequence, "free", (2, 8)), "windows": (Windowed, "free", (2, 8)),
    "windows, tokens first": (lambda: Windowed(2, tokens_first=True), "free", (2, 8)),
    "norms by channel": (Mapped, "free", (2, 8)), "shared keys": (traced_models.Grouped, "free", (2, 4)),
    "turned": (traced_models.Rotary, "planes", (2, 8)), "shared keys, turned": (SharedTurned, "planes", (4, 8)),
    "places added": (Placed, "none", (2, 8)), "bent": (lambda: Placed(bent=True), "none", (2, 8)),
}  # fmt: skip


def pixels(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 8, 12, generator=torch.Generator().manual_seed(seed))


def site_of(model: nn.Module) -> TracedPairs:
    (site,) = (each for each in sites_of(model).every if each.name.endswith(".qk"))
    assert isinstance(site, TracedPairs), site
    return site


def queries_and_keys(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """As calibration hears them, [X,H,N,D] float64, each window by itself."""
    taps, given = site_of(model).listening()[0].taps, dict[str, Tensor]()
    handles = [taps[role].listen("", partial(given.__setitem__, role)) for role in ("q", "k")]
    with torch.no_grad():
        listened(model)(images)
    for handle in handles:
        handle.remove()
    q, k = (given[role].double() if given[role].dim() == 4 else given[role].double().flatten(0, 1) for role in "qk")
    return q, k


def products(model: nn.Module, images: Tensor) -> Tensor:
    """All products of queries with keys, sorted, as the program itself makes them."""
    site = site_of(model)
    queries, keys = site.groups.listening
    reader = site.tracing.by_node[queries.reader]
    given = dict[str, Tensor]()

    class Run(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            given[n.name] = super().run_node(n)
            return given[n.name]

    with torch.no_grad():
        Run(site.program.graph).run(images)
    q, k = given[queries.name], given[keys.name]
    if "attention" in str(reader.target):
        return (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).flatten().sort().values
    return given[reader.name].flatten().sort().values


def lost(dense: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> float:
    """The mean square of what products lose, over all queries and all keys of all images, keys less their mean."""
    total = 0.0
    (q, k), (new_q, new_k) = ((q, k - k.mean(-2, keepdim=True)) for q, k in (dense, new))
    for head in range(q.shape[1]):
        old = q[:, head].flatten(0, 1) @ k[:, head].flatten(0, 1).T
        total += float((old - new_q[:, head].flatten(0, 1) @ new_k[:, head].flatten(0, 1).T).square().sum())
    return total


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", MODELS)
def test_half_of_the_dimensions_go(name: str, tmp_path: Path) -> None:
    """What calibration hears is what the program multiplies, and the reduced program loses what is reported."""
    _, mixing, heads = MODELS[name]
    checkpoint = written_by("tests.test_traced_pairs.OfImages", name=name)
    dense = checkpoint.model
    images = pixels(12, 1)
    q, k = queries_and_keys(dense, images)
    assert (q.shape[1], q.shape[3]) == heads
    torch.testing.assert_close((q @ k.mT).flatten().sort().values.float(), products(dense, images))
    assert site_of(dense).repair.mixing == mixing

    opened = tiny.opened(tmp_path / "calibration.npy", images.numpy(), dense)
    moments = calibrate(checkpoint, opened, batch_size=5, statistics=Statistics(attention_system=True))
    whole, errors = lost((q, k), (0 * q, 0 * k)), dict[str, float]()
    for preset in ("none", "corp", "best"):
        method = method_from_preset(preset, attention_sparsity=0.5, align_head=2)
        assert bool(uniform_widths(dense, method)) == (mixing != "none" or preset == "none")
        site = site_of(dense)
        reduction = reduce(dense, moments, method, widths={site.name: site.width // 2})
        (report,) = reduction.sites
        assert bool(reduction.notes) == (mixing == "none" and preset != "none"), reduction.notes
        assert (report.width_dense, report.width) == (heads[1], heads[1] // 2), reduction.notes
        errors[preset] = lost((q, k), queries_and_keys(reduction.model, images)) / whole
        if preset != "corp" or mixing == "none":
            assert report.error / report.energy == pytest.approx(errors[preset], rel=1e-4)
    assert errors["best"] <= errors["corp"] * (1 + 1e-9)
    assert errors["best"] <= {"free": 0.9, "planes": 1.0 - 1e-6, "none": 1.0}[mixing] * errors["none"], errors
