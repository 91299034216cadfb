"""calib.collect: batching, kernels, hooks and refusals; test_calib_weights.py compares its sums with loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from calib import products
from calib.collect import Options, collect
from calib.combination import merge_moments
from calib.inputs import Inputs
from calib.moments import ChannelMoments, Moments
from calib.sites import ChannelTaps, HeadTaps, Site, Tap
from ground.errors import BadInput
from tests.refusals import rejects
from tests.sums import assert_equal, sums_of

HEADS, DIM, WIDTH, HIDDEN, TOKENS = 2, 8, 16, 208, 5


class TinyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)
        self.proj = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_from_qkv(self.qkv(x))
        z = (q @ k.mT).softmax(-1) @ v
        out: Tensor = self.proj(z.transpose(1, 2).flatten(2))
        return out


class TinyViT(nn.Module):
    """A block on five tokens, the 2x2 patches of 2 x 10 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.attn = TinyAttention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = x + self.attn(x)
        x = x + self.fc2(self.drop(nn.functional.gelu(self.fc1(x))))
        out: Tensor = x.mean(1)
        return out


def heads_from_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.reshape(*qkv.shape[:2], 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def tiny() -> TinyViT:
    """Return a model whose keys have a large mean, as keys of trained models have."""
    torch.manual_seed(0)
    model = TinyViT()
    with torch.no_grad():
        model.attn.qkv.bias[HEADS * DIM : 2 * HEADS * DIM] += 30.0
    return model


def sites_of(model: TinyViT) -> list[Site]:
    def tap(index: int) -> Tap:
        return Tap(module=model.attn.qkv, take=lambda out: heads_from_qkv(out)[index])

    attention = HeadTaps(name="attn", queries=tap(0), keys=tap(1), output=model.attn.proj)
    return [attention, ChannelTaps(name="mlp", output=model.fc2)]


def images_of(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 2, 10, generator=torch.Generator().manual_seed(seed))


def collected(images: Tensor, batch: int, **options: Any) -> Moments:
    model = tiny()
    return collect(model, sites_of(model), torch.split(images, batch), device="cpu", options=Options(**options))


def relative(got: Tensor, expected: Any) -> float:
    return float((got - expected).norm() / expected.norm())


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(4)), pieces=st.integers(1, 4))
def test_order_and_batching_of_images_do_not_matter(order: list[int], pieces: int) -> None:
    """A forward pass takes 8 images, so groups of 8 may come in any order and in any batch."""
    images = images_of(32)
    moved = torch.cat([images.split(8)[index] for index in order])
    whole, other = (collected(each, 8 * size, attention_system=True) for each, size in ((images, 4), (moved, pieces)))
    assert_equal(other, whole, 1e-12)


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, 12))
def test_merged_parts_equal_the_whole(cut: int) -> None:
    images = images_of(13)
    parts = [collected(part, 4, attention_system=True) for part in (images[:cut], images[cut:])]
    merged = merge_moments(*parts)
    assert merged.images == 13
    assert_equal(merged, collected(images, 4, attention_system=True), shared=2e-7)
    for site, moments in merged.sites.items():
        for name, value in sums_of(moments).items():
            assert relative(value, sum(sums_of(part.sites[site])[name] for part in parts)) < 1e-15, name


@pytest.mark.parametrize("kernel", ["blas", "onednn"])
@pytest.mark.parametrize("shape", [(8, 197, 400), (2, 4000, 32), (3, 5, 8), (1, 1, 1)])
def test_both_kernels_compute_the_gram(kernel: products.Kernel, shape: tuple[int, int, int]) -> None:
    """The shapes have several block rows, more tokens than one product takes, and fewer channels than a block."""
    x_BNF = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 3.0  # terms of one sign are the worst case
    total_FF = torch.zeros(shape[-1], shape[-1], dtype=torch.float64)
    for _ in range(2):
        products.add_gram_(total_FF, x_BNF, kernel)
    total_FF.add_(torch.ones_like(total_FF).tril(-1))  # as if the kernel rounded the lower triangle differently
    products.mirror_(total_FF)
    assert torch.equal(total_FF, total_FF.mT)
    scale, x_nF = float(total_FF.diagonal().mean()), x_BNF.double().flatten(0, 1)
    assert float((total_FF - 2.0 * x_nF.T @ x_nF).abs().max()) < 2e-6 * scale


def clock_of(*spans: float) -> Callable[[], float]:
    """Return a clock on which consecutive trials take these times."""
    now = [moment for span in spans for moment in (0.0, span)]
    return iter(now).__next__


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ((2.0, 1.0) * 5, "onednn"),
        ((1.0, 2.0) * 5, "blas"),
        ((1.0, 0.95) * 5, "blas"),  # too close to matter
        ((9.0, 1.0) * 4 + (1.0, 1.0), "blas"),  # only the least time of each kernel counts
    ],
)
def test_faster_kernel_is_chosen(spans: tuple[float, ...], expected: str) -> None:
    assert products.faster_kernel(clock_of(*spans)) == expected


def test_narrow_grams_skip_the_kernel_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "kernel_of_this_cpu", lambda: "onednn")
    assert products.kernel_for(384) == "blas"
    assert products.kernel_for(1536) == ("onednn" if torch.backends.mkldnn.is_available() else "blas")


def test_model_is_left_unchanged() -> None:
    model = tiny()
    model.attn.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    collect(model, sites_of(model), [images_of(3)], device="cpu")
    inside = list(model.attn.modules())
    assert [module.training for module in model.modules()] == [module not in inside for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_are_removed_when_a_batch_fails() -> None:
    model = tiny()
    with pytest.raises(BadInput):
        collect(model, sites_of(model), [images_of(2).double()], device="cpu")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_first_site_with_nonfinite_activations_is_named(bad: float) -> None:
    model = tiny()
    with torch.no_grad():
        model.fc1.bias[3] = bad
    rejects(r"^mlp: NaN or Inf", collect, model, sites_of(model), [images_of(2)], device="cpu")
    with torch.no_grad():
        model.attn.qkv.bias[0] = bad
    rejects(r"^attn: NaN or Inf", collect, model, sites_of(model), [images_of(2)], device="cpu")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "got none, expected at least one"),
        ([torch.zeros(2, 3, 2, 10, dtype=torch.float64)], "float64"),
        ([torch.zeros(2, 3, 2, 10, dtype=torch.complex64)], r"input torch\.complex64.*expected float32, whole numbers"),
        ([torch.tensor(1.0)], r"input torch\.float32 \[\]; expected the same batch"),
        ([torch.zeros(0, 3, 2, 10)], r"\[0, 3, 2, 10\]"),
        ([{}], "no tensor; expected the same batch"),
        ([{"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}], r"a torch\.float32 \[2, 3\], b torch\.float32 \[3, 3\]"),
    ],
)
def test_malformed_batches_are_refused(batches: list[Inputs], message: str) -> None:
    model = tiny()
    rejects(message, collect, model, sites_of(model), batches, device="cpu")


def test_site_that_never_runs_is_named() -> None:
    model = tiny()
    with pytest.raises(BadInput, match=r"^other: x was computed 0 times"):
        collect(model, [ChannelTaps(name="other", output=nn.Linear(2, 2))], [images_of(2)], device="cpu")


def test_duplicate_site_names_are_refused() -> None:
    model = tiny()
    for sites in ([], sites_of(model) * 2):
        rejects("every name once", collect, model, sites, [images_of(2)], device="cpu")


def test_bfloat16_forward_keeps_float32_statistics() -> None:
    exact = collected(images_of(8), 4).sites["mlp"]
    rough = collected(images_of(8), 4, precision="bfloat16").sites["mlp"]
    assert isinstance(exact, ChannelMoments)
    assert isinstance(rough, ChannelMoments)
    assert 0 < relative(rough.gram_FF, exact.gram_FF) < 0.02
    assert rough.gram_FF.dtype == torch.float64


def test_site_that_runs_twice_is_named() -> None:
    class Twice(TinyViT):
        def forward(self, images: Tensor) -> Tensor:
            super().forward(images)
            return super().forward(images)

    model = Twice()
    rejects(r"^attn: q was computed 2 times", collect, model, sites_of(model), [images_of(4)], device="cpu")


def test_later_passes_stop_at_the_last_site() -> None:
    model = tiny()
    ran: list[int] = []
    model.fc1.register_forward_hook(lambda *_: ran.append(1))
    collect(model, sites_of(model)[:1], [images_of(12)], device="cpu")
    assert len(ran) == 1


class Grid(nn.Module):
    """A linear layer on a grid of tokens with the channels last, then a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.same, self.conv = nn.Linear(3, 4), nn.Identity(), nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        grid: Tensor = self.linear(images.permute(0, 2, 3, 1))
        out: Tensor = self.conv(self.same(grid.permute(0, 3, 1, 2)))
        return out


def test_grid_input_of_a_linear_layer_is_flattened_to_tokens() -> None:
    model, images = Grid(), images_of(9)
    site = collect(model, [ChannelTaps(name="grid", output=model.linear)], [images], device="cpu").sites["grid"]
    assert isinstance(site, ChannelMoments)
    pixels = images.double().permute(0, 2, 3, 1).reshape(-1, 3)
    assert site.tokens == len(pixels) == 9 * 20
    assert relative(site.gram_FF, pixels.T @ pixels) < 1e-6


@pytest.mark.parametrize(("module", "kind"), [("conv", "Conv2d"), ("same", "Identity")])
def test_feature_maps_are_refused_by_name(module: str, kind: str) -> None:
    model = Grid()
    tap = Tap(module=model.linear, take=lambda out: out)
    site = HeadTaps(name="map", output=model.get_submodule(module), queries=tap, keys=tap)
    with pytest.raises(
        BadInput, match=rf"^map: {kind} takes \[8, 4, 2, 10\], a feature map \[batch, channels, \.\.\.\]"
    ):
        collect(model, [site], [images_of(2)], device="cpu")


def test_tokens_packed_into_the_batch_are_refused() -> None:
    class Packed(TinyViT):
        def forward(self, images: Tensor) -> Tensor:
            tokens = self.patches(images).flatten(2).mT
            out: Tensor = super().forward(images) + self.fc2(self.fc1(tokens.flatten(0, 1))).mean()
            return out

    model = Packed()
    with pytest.raises(BadInput, match=r"^mlp: x is torch.float32 \[40, 1, 208\] for a batch of 8, expected"):
        collect(model, [ChannelTaps(name="mlp", output=model.fc2)], [images_of(2)], device="cpu")
