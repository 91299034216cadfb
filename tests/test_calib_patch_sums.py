"""Statistics of convolutions against float64 loops, their patches, merging, files, refusals and memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from calib import patch_sums
from calib.collect import Collector, collect
from calib.combination import merge_moments, moments_without
from calib.fingerprints import Fingerprints
from calib.memory import Shape, bytes_needed, patch_channels_that_fit, shapes_of_sites
from calib.moments import ChannelMoments, Moments
from calib.patch_moments import PatchMoments
from calib.patch_sums import patches_of_map
from calib.redundancy import ChannelRedundancy, redundancy_of_sites
from calib.sites import PatchTaps
from calib.store import load_moments, save_moments
from ground.errors import BadInput
from tests.refusals import rejects
from tests.sums import assert_equal, sums_of

from .tiny_maps import (
    CHANNELS_GR,
    collected,
    images_of,
    maps_at,
    patch_moments,
    relative,
    sums_by_loops,
    taps_of,
    tiny_maps,
)


@pytest.mark.parametrize(("whole_numbers", "limit"), [(True, 1e-9), (False, 1e-6)])
def test_every_sum_equals_float64_loops(whole_numbers: bool, limit: float) -> None:
    images = images_of(9, whole_numbers=whole_numbers)
    moments = collected(images, 5, whole_numbers=whole_numbers)
    model = tiny_maps(whole_numbers=whole_numbers)
    heard = maps_at(model, images)
    for site in taps_of(model):
        got, expected = patch_moments(moments, site.name), sums_by_loops(site, heard[site.name])
        assert set(sums_of(got)) == set(expected)
        for name, value in sums_of(got).items():
            assert relative(value, expected[name]) < limit, (site.name, name)
        x, y = heard[site.name]
        assert (got.taps, got.map_tokens, got.tokens) == (site.places, x[:, 0].numel(), y[:, 0].numel())


def test_narrow_and_wide_groups_are_summed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_of(9)
    narrow = collected(images, 9)
    monkeypatch.setattr(patch_sums, "CPU_ROWS", 0)
    assert_equal(collected(images, 9), narrow, 1e-6)


@pytest.mark.parametrize("patch_bytes", [1, 3000, 20_000])
def test_chunk_size_does_not_change_the_sums(patch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collected(images_of(9, whole_numbers=True), 9, whole_numbers=True)
    monkeypatch.setattr(patch_sums, "PATCH_BYTES", patch_bytes)
    assert_equal(collected(images_of(9, whole_numbers=True), 9, whole_numbers=True), whole, 0.0)


def test_derived_moments_are_per_position() -> None:
    images = images_of(8)
    moments, model = collected(images, 8), tiny_maps()
    heard = maps_at(model, images)
    site = patch_moments(moments, "grouped")
    sums = sums_by_loops(taps_of(model)[3], heard["grouped"])
    x, y = (each.double() for each in heard["grouped"])
    x_nGC = x.permute(0, 2, 3, 1).reshape(-1, 2, 6)
    assert relative(site.mean_GU, sums["sum_GU"] / site.tokens) < 1e-6
    assert relative(site.second_GUU, sums["gram_GUU"] / site.tokens) < 1e-6
    assert relative(site.map_mean_GC, x_nGC.mean(0)) < 1e-6
    for group in range(2):
        assert relative(site.map_covariance_GCC[group], torch.cov(x_nGC[:, group].T, correction=0)) < 1e-5
        assert relative(site.map_second_GCC[group], x_nGC[:, group].T @ x_nGC[:, group] / len(x_nGC)) < 1e-6
    assert relative(site.active_share_GC, (x_nGC.abs() > 1e-3).double().mean(0)) < 1e-12
    assert relative(site.target_mean_O, y.mean((0, 2, 3))) < 1e-6
    mean_C, covariance_CC = site.entering
    assert relative(mean_C, x.mean((0, 2, 3))) < 1e-6
    assert torch.equal(covariance_CC[:6, :6], site.map_covariance_GCC[0])
    assert not covariance_CC[:6, 6:].any()


@settings(max_examples=8, deadline=None)
@given(batch=st.integers(1, 13), order=st.permutations(range(13)))
def test_batch_size_and_order_do_not_matter(batch: int, order: list[int]) -> None:
    images = images_of(13)
    assert_equal(collected(images[order], batch), collected(images, 13), 2e-6)


def with_ids(moments: Moments, first: int) -> Moments:
    return replace(moments, fingerprints=Fingerprints(ids=torch.arange(first, first + moments.images)))


def test_calibrations_merge_and_split() -> None:
    images = images_of(16)
    a, b = (with_ids(collected(part, 8), first) for part, first in ((images[:8], 0), (images[8:], 8)))
    both = merge_moments(a, b)
    assert_equal(both, with_ids(collected(images, 8), 0), 1e-12)
    assert_equal(moments_without(both, b), a)
    assert patch_moments(both, "some").taps == patch_moments(moments_without(both, b), "some").taps == 6


def test_moments_of_different_channels_do_not_merge() -> None:
    a, b = (with_ids(collected(images_of(3), 3), first) for first in (0, 3))
    other = replace(patch_moments(b, "some"), channels_GR=CHANNELS_GR.flip(0))
    for site, message in (
        (other, "some: moments to merge differ in channels_GR"),
        (b.sites["grouped"], r"some\.sum_GU: moments to merge are \[2, 18\] and \[2, 36\]"),
    ):
        rejects(message, merge_moments, a, replace(b, sites={**b.sites, "some": site}))


def test_patch_moments_round_trip(tmp_path: Path) -> None:
    moments = collected(images_of(3), 3)
    save_moments(moments, tmp_path / "moments.safetensors")
    got = load_moments(tmp_path / "moments.safetensors")
    assert_equal(got, moments, 0.0)
    assert (patch_moments(got, "some").eps, patch_moments(got, "grouped").channels_GR) == (1e-3, None)
    save_moments(got, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "moments.safetensors").read_bytes()


def test_continuing_from_moments_is_bit_identical() -> None:
    images, model = images_of(24), tiny_maps()
    first = collected(images[:8], 8)
    with Collector(model, taps_of(model), device="cpu") as collector:
        collector.resume_from(first, "blas")
        collector.add(images[8:])
        got = collector.moments({})
    assert_equal(got, collected(images, 8), 0.0)


def test_continuing_with_other_channels_is_refused() -> None:
    model = tiny_maps()
    sites = [replace(site, channels_GR=None) for site in taps_of(model)]
    with pytest.raises(BadInput, match=r"^some: the sums so far have patches of other channels"):
        Collector(model, sites, device="cpu").resume_from(collected(images_of(2), 2), "blas")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_first_site_with_nonfinite_inputs_is_named(bad: float) -> None:
    images = images_of(3)
    images[1, 0, 0, 0] = bad
    rejects(r"^strided: NaN or Inf", collected, images, 3)
    model = tiny_maps()
    with torch.no_grad():
        model.grouped.bias[2] = bad  # type: ignore[index]
    rejects(r"^grouped: NaN or Inf", collect, model, taps_of(model), [images_of(3)], device="cpu")


def test_token_weights_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^around: a convolution reads a map, whose places have no weights"):
        collected(images_of(3), 3, token_weights=lambda images: torch.ones(len(images), 5))
    collected(images_of(3), 3, token_weights=lambda images: None)


def test_zero_padding_of_a_convolution_is_found() -> None:
    class Around(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(functional.pad(input, (0, 1, 0, 1)))

    model = Around(3, 6, 2, 2)
    with pytest.raises(BadInput, match=r"^conv: gives a map of \[6, 7\], expected \[5, 6\] with its padding of"):
        collect(model, [PatchTaps(name="conv", output=model)], [images_of(2)], device="cpu")


def test_map_without_a_batch_dimension_is_refused() -> None:
    class Unbatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)

        def forward(self, images: Tensor) -> Tensor:
            out: Tensor = self.conv(images[0])
            return out

    model = Unbatched()
    with pytest.raises(
        BadInput, match=r"^conv: got \[3, 11, 13\], expected a map \[batch, 3 channels, rows, columns\]"
    ):
        collect(model, [PatchTaps(name="conv", output=model.conv)], [images_of(2)], device="cpu")


def broken(**changes: object) -> Callable[[PatchMoments], PatchMoments]:
    return lambda site: replace(site, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken(taps=0), r"PatchMoments\.taps: got 0"),
        (broken(tokens=0), r"PatchMoments\.tokens: got 0"),
        (broken(map_tokens=float("inf")), r"PatchMoments\.map_tokens: got inf"),
        (broken(eps=-1.0), r"PatchMoments\.eps: got -1"),
        (broken(taps=5), r"PatchMoments\.sum_GU: got torch\.float64 \[2, 18\], expected float64 \[2, 15\]"),
        (broken(cross_GPU=None), r"PatchMoments\.cross_GPU: expected with channels_GR"),
        (broken(channels_GR=None, cross_GPU=None), r"PatchMoments\.sum_GU"),
        (broken(channels_GR=CHANNELS_GR.int()), r"PatchMoments\.channels_GR: got torch\.int32"),
        (broken(target_sum_O=torch.zeros(11).double()), r"PatchMoments\.target_square_O"),
    ],
)
def test_impossible_moments_are_refused(change: Callable[[PatchMoments], PatchMoments], message: str) -> None:
    site = patch_moments(collected(images_of(2), 2), "some")
    rejects(message, change, site)


def test_redundancy_of_planted_channels_is_found() -> None:
    """The first group's channels share one signal and the second group's are silent, so one direction holds all."""
    site = patch_moments(collected(images_of(4), 4), "grouped")
    direction = torch.arange(1.0, 7.0, dtype=torch.float64)
    gram = torch.stack([torch.outer(direction, direction), torch.zeros(6, 6).double()])
    nothing = torch.zeros(2, 6).double()
    planted = replace(site, map_gram_GCC=gram, map_sum_GC=nothing, active_GC=nothing)
    row = redundancy_of_sites(Moments(sites={"conv": planted}, lineage={}, images=4))[0]
    assert isinstance(row, ChannelRedundancy)
    assert (row.type, row.dim, row.k95, row.activation_sparsity) == ("convolution", 12, 1, 1.0)
    assert row.effective_rank == pytest.approx(1.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def convolve_patches(u_BNGU: Tensor, conv: nn.Conv2d) -> Tensor:
    """Multiply patches by the weights of their groups, [B,N,O]."""
    weight_GPU = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
    return torch.einsum("bngu,gpu->bngp", u_BNGU, weight_GPU).flatten(2)


sides = st.sampled_from([1, 2, 3, 4, 5, 7])


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(sides, sides),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    groups=st.sampled_from([1, 2, 6]),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_patches_times_weights_equal_the_convolution(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    padding: tuple[int, int],
) -> None:
    conv = nn.Conv2d(6, 12, kernel, stride, padding, dilation, groups, bias=False).double()
    x_BCHW = random(2, 6, 20, 15)
    with torch.no_grad():
        expected = conv(x_BCHW)
        u_BNGU = patches_of_map(x_BCHW, conv)
        got = convolve_patches(u_BNGU, conv)
    assert u_BNGU.shape == (2, expected[0, 0].numel(), groups, 6 // groups * kernel[0] * kernel[1])
    torch.testing.assert_close(got, expected.flatten(2).mT, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid", 0, 2, (1, 0)])
@pytest.mark.parametrize("kernel", [3, (2, 4)])
def test_convolution_without_padding_equals_its_patches(
    padding: str | int | tuple[int, int], kernel: int | tuple[int, int]
) -> None:
    conv = nn.Conv2d(4, 5, kernel, padding=padding, dilation=(1, 2), bias=False).double()
    x_BCHW = random(3, 4, 9, 11)
    with torch.no_grad():
        expected = functional.conv2d(x_BCHW, conv.weight, padding=padding, dilation=(1, 2))
        got = convolve_patches(patches_of_map(x_BCHW, conv), conv)
    torch.testing.assert_close(got, expected.flatten(2).mT, rtol=1e-12, atol=1e-12)


def test_channels_last_maps_have_the_same_patches() -> None:
    conv, x_BCHW = nn.Conv2d(4, 4, 3, 2, 1, groups=2), random(2, 4, 7, 7).float()
    last = x_BCHW.contiguous(memory_format=torch.channels_last)
    assert torch.equal(patches_of_map(last, conv), patches_of_map(x_BCHW, conv))


def test_non_zero_padding_is_refused() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")
    rejects(r"'reflect'.*only zero padding", patches_of_map, torch.zeros(1, 2, 4, 4), conv)
    rejects(r"^stem: pads by 'reflect'", PatchTaps, name="stem", output=conv)


@pytest.mark.parametrize(
    "channels_GR",
    [
        torch.tensor([[0, 1]]),
        torch.tensor([[1, 0], [0, 1]]),
        torch.tensor([[0, 0], [0, 1]]),
        torch.tensor([[0, 3], [0, 1]]),
        torch.tensor([[-1, 0], [0, 1]]),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, 1),
        torch.tensor([0, 1]),
    ],
)
def test_channels_outside_the_groups_are_refused(channels_GR: Tensor) -> None:
    with pytest.raises(BadInput, match=r"^conv: channels of patches are .*int64 \[2, any\], sorted, below each"):
        PatchTaps(name="conv", output=nn.Conv2d(6, 2, 3, groups=2), channels_GR=channels_GR)


def test_predicted_memory_equals_the_size_of_the_moments() -> None:
    model = tiny_maps()
    shapes = shapes_of_sites(model, taps_of(model), example=images_of(1), device="cpu")
    assert shapes["some"] == patch_shape(6 * 6, groups=2, channels=6, taps=6, outputs=12).with_patches_of(3)
    needed = bytes_needed(shapes, attention_system=True)
    for name, site in collected(images_of(2), 2).sites.items():
        assert sum(each.nbytes for each in sums_of(site).values()) == needed[name], name


def patch_shape(tokens: int, *, groups: int, channels: int, taps: int, outputs: int) -> Shape:
    sizes = {"G": groups, "C": channels, "R": channels, "T": taps, "U": channels * taps}
    return Shape(moments=PatchMoments, tokens=tokens, sizes=sizes | {"O": outputs, "P": outputs // groups})


def wide(channels: int, groups: int = 1) -> Shape:
    return patch_shape(49, groups=groups, channels=channels, taps=9, outputs=channels * groups)


SHAPES: dict[str, Shape] = {
    "a": wide(64), "b": wide(128), "c": wide(256), "d": wide(256), "depthwise": wide(1, 512),
    "mlp": Shape(moments=ChannelMoments, tokens=1, sizes={"F": 300}),
}  # fmt: skip
TOTAL = sum(bytes_needed(SHAPES).values())


def restricted(chosen: dict[str, int]) -> int:
    return sum(
        (shape.with_patches_of(chosen[name]) if name in chosen else shape).bytes_of_moments()
        for name, shape in SHAPES.items()
    )


def test_nothing_is_restricted_if_memory_suffices() -> None:
    assert patch_channels_that_fit(SHAPES, TOTAL) == {}


@pytest.mark.parametrize("share", [0.999, 0.9, 0.7, 0.5, 0.2, 0.06])
def test_largest_sites_lose_channels_until_memory_suffices(share: float) -> None:
    available = int(share * TOTAL)
    chosen = dict(patch_channels_that_fit(SHAPES, available))
    assert restricted(chosen) <= available
    assert all(8 <= count < 256 for count in chosen.values())
    assert set(chosen) in [set("cdba"[:count]) for count in range(1, 5)]
    least = next(count for count in range(5) if restricted(dict.fromkeys("cdba"[:count], 8)) <= available)
    assert len(chosen) <= least
    assert abs(chosen["c"] - chosen.get("d", chosen["c"])) <= 1 or len(chosen) == 1
    if max(chosen.values()) < 255:
        assert restricted({name: count + 3 for name, count in chosen.items()}) > available


def test_insufficient_memory_names_the_missing_bytes() -> None:
    least = restricted(dict.fromkeys("abcd", 8))
    assert set(patch_channels_that_fit(SHAPES, least).values()) == {8}
    with pytest.raises(BadInput, match=r"6 sites need more than .*, also with patches of 8 channels") as said:
        patch_channels_that_fit(SHAPES, least - 10_000_000)
    advised = float(str(said.value).split("give at least --patch-memory ")[1].split(",")[0]) * 1e9
    assert least <= advised <= 1.02 * least
    rejects("1 sites need", patch_channels_that_fit, {"mlp": SHAPES["mlp"]}, 1)


@settings(max_examples=50, deadline=None)
@given(images=st.integers(1, 9), rows=st.integers(1, 30), most=st.integers(1, 50))
def test_chunks_cover_every_row_of_every_image_once(images: int, rows: int, most: int) -> None:
    seen = list[tuple[int, int]]()
    for some, span in patch_sums._portions(images, rows, most):
        taken = [(image, row) for image in range(images)[some] for row in span]
        assert 0 < len(taken) <= most
        seen += taken
    assert sorted(seen) == [(image, row) for image in range(images) for row in range(rows)]
