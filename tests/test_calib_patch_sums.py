"""Statistics of convolutions against float64 loops over images and places, merged, halved, saved and refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from calib import patch_sums
from calib.collect import Collector, collect
from calib.combination import merge, rest
from calib.moments import Moments, on_device
from calib.patch_moments import PatchMoments
from calib.redundancy import PatchRedundancy, redundancy
from calib.sites import PatchTaps
from calib.store import load, save
from ground.errors import BadInput
from tests.tiny_maps import (
    CHANNELS_GR,
    collected,
    images_of,
    maps_at,
    patch_moments,
    relative,
    sums_by_loops,
    sums_of,
    taps_of,
    tiny_maps,
)

NAMES = [site.name for site in taps_of(tiny_maps())]


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
    for name in NAMES:
        for field, value in sums_of(patch_moments(collected(images, 9), name)).items():
            assert relative(value, sums_of(patch_moments(narrow, name))[field]) < 1e-6, (name, field)


@pytest.mark.parametrize("patch_bytes", [1, 3000, 20_000])
def test_how_many_rows_are_taken_at_a_time_changes_nothing(patch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collected(images_of(9, whole_numbers=True), 9, whole_numbers=True)
    monkeypatch.setattr(patch_sums, "PATCH_BYTES", patch_bytes)
    parts = collected(images_of(9, whole_numbers=True), 9, whole_numbers=True)
    for name in NAMES:
        for field, value in sums_of(patch_moments(parts, name)).items():
            assert torch.equal(value, sums_of(patch_moments(whole, name))[field]), (name, field)


@settings(max_examples=50, deadline=None)
@given(images=st.integers(1, 9), rows=st.integers(1, 30), most=st.integers(1, 50))
def test_portions_cover_every_row_of_every_image_once(images: int, rows: int, most: int) -> None:
    seen = list[tuple[int, int]]()
    for some, span in patch_sums._portions(images, rows, most):
        taken = [(image, row) for image in range(images)[some] for row in span]
        assert 0 < len(taken) <= most
        seen += taken
    assert sorted(seen) == [(image, row) for image in range(images) for row in range(rows)]


def test_derived_moments_are_per_place() -> None:
    images = images_of(8)
    moments, model = collected(images, 8), tiny_maps()
    heard = maps_at(model, images)
    site = patch_moments(moments, "grouped")
    sums = sums_by_loops(taps_of(model)[3], heard["grouped"])
    x, y = (each.double() for each in heard["grouped"])
    x_nGC = x.permute(0, 2, 3, 1).reshape(-1, 2, 6)
    assert relative(site.mean_GU, sums["sum_GU"] / site.tokens) < 1e-6
    assert relative(site.second_GUU, sums["gram_GUU"] / site.tokens) < 1e-6
    mean = sums["sum_GU"] / site.tokens
    centred = sums["gram_GUU"] / site.tokens - mean[:, :, None] * mean[:, None]
    assert relative(site.covariance_GUU, centred) < 1e-5
    assert relative(site.map_mean_GC, x_nGC.mean(0)) < 1e-6
    for group in range(2):
        assert relative(site.map_covariance_GCC[group], torch.cov(x_nGC[:, group].T, correction=0)) < 1e-5
        assert relative(site.map_second_GCC[group], x_nGC[:, group].T @ x_nGC[:, group] / len(x_nGC)) < 1e-6
    assert relative(site.active_share_GC, (x_nGC.abs() > 1e-3).double().mean(0)) < 1e-12
    assert relative(site.target_mean_O, y.mean((0, 2, 3))) < 1e-6
    assert relative(site.target_variance_O, y.transpose(0, 1).flatten(1).var(1, correction=0)) < 1e-5
    mean_C, covariance_CC = site.entering
    assert relative(mean_C, x.mean((0, 2, 3))) < 1e-6
    assert torch.equal(covariance_CC[:6, :6], site.map_covariance_GCC[0])
    assert not covariance_CC[:6, 6:].any()


def test_cross_products_follow_from_the_weights_where_all_channels_are_there() -> None:
    """y = W u + b: the restricted columns of W E[uu'] + b E[u]'."""
    images, model = images_of(9), tiny_maps()
    moments = collected(images, 9)
    whole, some = patch_moments(moments, "grouped"), patch_moments(moments, "some")
    assert some.cross_GPU is not None
    weight_GPU = model.grouped.weight.detach().double().flatten(1).unflatten(0, (2, -1))
    assert model.grouped.bias is not None
    bias_GP1 = model.grouped.bias.detach().double().view(2, -1, 1)
    cross_GPU = weight_GPU @ whole.gram_GUU + bias_GP1 * whole.sum_GU[:, None]
    columns = [[int(c) * 6 + place for c in channels for place in range(6)] for channels in CHANNELS_GR]
    expected = torch.stack([cross_GPU[group][:, chosen] for group, chosen in enumerate(columns)])
    assert relative(some.cross_GPU, expected) < 1e-6


def assert_equal_to_rounding(got: Moments, expected: Moments, limit: float = 2e-6) -> None:
    for name in NAMES:
        one, other = patch_moments(got, name), patch_moments(expected, name)
        assert (one.tokens, one.map_tokens) == (other.tokens, other.map_tokens)
        for field, value in sums_of(one).items():
            assert relative(value, sums_of(other)[field]) < limit, (name, field)


@settings(max_examples=8, deadline=None)
@given(batch=st.integers(1, 13), order=st.permutations(range(13)))
def test_batch_size_and_order_do_not_matter(batch: int, order: list[int]) -> None:
    images = images_of(13)
    assert_equal_to_rounding(collected(images[order], batch), collected(images, 13))


def test_the_same_pieces_in_any_order_are_the_same_to_float64_rounding() -> None:
    images = images_of(24)
    moved = torch.cat([images.split(8)[index] for index in (2, 0, 1)])
    assert_equal_to_rounding(collected(moved, 16), collected(images, 8), 1e-12)


def with_ids(moments: Moments, first: int) -> Moments:
    return replace(moments, image_ids=torch.arange(first, first + moments.images))


def test_two_calibrations_merge_into_one_and_come_apart_again() -> None:
    images = images_of(16)
    a, b = (with_ids(collected(part, 8), first) for part, first in ((images[:8], 0), (images[8:], 8)))
    both = merge(a, b)
    assert_equal_to_rounding(both, collected(images, 8), 1e-12)
    assert_equal_to_rounding(rest(both, b), a, 1e-9)
    assert patch_moments(both, "some").taps == patch_moments(rest(both, b), "some").taps == 6


def test_moments_of_other_channels_do_not_merge() -> None:
    a, b = (with_ids(collected(images_of(3), 3), first) for first in (0, 3))
    other = replace(patch_moments(b, "some"), channels_GR=CHANNELS_GR.flip(0))
    with pytest.raises(BadInput, match="some: moments to merge differ in channels_GR"):
        merge(a, replace(b, sites={**b.sites, "some": other}))
    with pytest.raises(BadInput, match=r"some\.sum_GU: moments to merge are \[2, 18\] and \[2, 36\]"):
        merge(a, replace(b, sites={**b.sites, "some": b.sites["grouped"]}))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    moments = collected(images_of(3), 3)
    save(moments, tmp_path / "moments.safetensors")
    got = load(tmp_path / "moments.safetensors")
    assert list(got.sites) == NAMES
    for name in NAMES:
        one, other = patch_moments(got, name), patch_moments(moments, name)
        assert (one.taps, one.tokens, one.map_tokens, one.eps) == (other.taps, other.tokens, other.map_tokens, 1e-3)
        assert all(torch.equal(value, sums_of(other)[field]) for field, value in sums_of(one).items())
    chosen = patch_moments(got, "some").channels_GR
    assert chosen is not None
    assert torch.equal(chosen, CHANNELS_GR)
    assert patch_moments(got, "grouped").channels_GR is None
    save(got, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "moments.safetensors").read_bytes()


def test_going_on_from_moments_gives_the_same_bits() -> None:
    images, model = images_of(24), tiny_maps()
    first = collected(images[:8], 8)
    with Collector(model, taps_of(model), device="cpu") as collector:
        collector.go_on_from(first, "blas")
        collector.add(images[8:])
        got = collector.moments({})
    expected = collected(images, 8)
    for name in NAMES:
        for field, value in sums_of(patch_moments(got, name)).items():
            assert torch.equal(value, sums_of(patch_moments(expected, name))[field]), (name, field)


def test_going_on_with_other_channels_is_refused() -> None:
    model = tiny_maps()
    sites = [replace(site, channels_GR=None) for site in taps_of(model)]
    with pytest.raises(BadInput, match=r"^some: the sums so far have patches of other channels"):
        Collector(model, sites, device="cpu").go_on_from(collected(images_of(2), 2), "blas")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_site_that_reads_nan_or_inf_is_named(bad: float) -> None:
    images = images_of(3)
    images[1, 0, 0, 0] = bad
    with pytest.raises(BadInput, match=r"^strided: NaN or Inf"):
        collected(images, 3)
    model = tiny_maps()
    with torch.no_grad():
        model.grouped.bias[2] = bad  # type: ignore[index]
    with pytest.raises(BadInput, match=r"^grouped: NaN or Inf"):
        collect(model, taps_of(model), [images_of(3)], device="cpu")


def test_weights_of_tokens_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^around: a convolution reads a map, whose places have no weights"):
        collected(images_of(3), 3, token_weights=lambda images: torch.ones(len(images), 5))
    collected(images_of(3), 3, token_weights=lambda images: None)


def test_zeros_that_are_not_told_are_found() -> None:
    model = tiny_maps()
    sites = [PatchTaps(name="around", output=model.around, edges=edges) for edges in ((0, 1, 0, 1), (0, 2, 0, 3))]
    collect(model, sites[:1], [images_of(2)], device="cpu")
    with pytest.raises(
        BadInput, match=r"^around: gives a map of \[3, 3\], expected \[4, 4\] with edges of \(0, 2, 0, 3\)"
    ):
        collect(model, sites[1:], [images_of(2)], device="cpu")


def test_a_picture_without_a_batch_is_no_map() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)

        def forward(self, images: Tensor) -> Tensor:
            out: Tensor = self.conv(images[0])
            return out

    model = Alone()
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
    with pytest.raises(BadInput, match=message):
        change(site)


def test_moments_move_whole() -> None:
    site = patch_moments(collected(images_of(2), 2), "some")
    moved = on_device(site, "meta")
    assert all(value.device.type == "meta" for value in sums_of(moved).values())


def test_redundancy_of_a_planted_map() -> None:
    """Channels of one signal in the first group, silent ones in the second: one direction holds all."""
    site = patch_moments(collected(images_of(4), 4), "grouped")
    direction = torch.arange(1.0, 7.0, dtype=torch.float64)
    gram = torch.stack([torch.outer(direction, direction), torch.zeros(6, 6).double()])
    nothing = torch.zeros(2, 6).double()
    planted = replace(site, map_gram_GCC=gram, map_sum_GC=nothing, active_GC=nothing)
    row = redundancy(Moments(sites={"conv": planted}, lineage={}, images=4))[0]
    assert isinstance(row, PatchRedundancy)
    assert (row.kind, row.dim, row.k95, row.activation_sparsity) == ("convolution", 12, 1, 1.0)
    assert row.effective_rank == pytest.approx(1.0)
