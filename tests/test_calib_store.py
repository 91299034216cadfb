"""calib.store: moments round trip site by site, and damaged or foreign files are refused."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from calib import store
from calib.axes import SYMMETRIC
from calib.combination import merge_moments
from calib.fingerprints import Fingerprints
from calib.moments import ChannelMoments, HeadMoments, Moments, SiteMoments
from calib.store import load_moments, save_moments
from calib.sums import move_to_host
from ground.errors import BadInput
from tests.refusals import rejects


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gram(*shape: int, seed: int) -> Tensor:
    half = random(*shape, seed=seed)
    return half + half.mT


def mlp(seed: int = 0) -> ChannelMoments:
    return ChannelMoments(
        tokens=7, eps=0.01, sum_F=random(4, seed=seed), gram_FF=gram(4, 4, seed=seed), active_F=torch.ones(4).double()
    )


def attention(seed: int = 0, *, system: bool = False) -> HeadMoments:
    squares = {name: gram(2, 3, 3, seed=seed) for name in ("qq_HDD", "kk_HDD", "kk_centred_HDD")}
    rows = {name: random(2, 3, seed=seed) for name in ("q_sum_HD", "k_sum_HD", "energy_HD")}
    outputs = {"z_sum_C": random(6, seed=seed), "zz_CC": gram(6, 6, seed=seed)}
    system_HTT = random(2, 6, 6, seed=seed) if system else None
    return HeadMoments(images=2, tokens=7, system_HTT=system_HTT, **squares, **rows, **outputs)


def moments(seed: int = 0, *, ids: tuple[int, ...] = (1, 2), system: bool = False, **lineage: str) -> Moments:
    sites: dict[str, SiteMoments] = {"blocks.0.attn": attention(seed, system=system), "blocks.0.mlp": mlp(seed)}
    lineage = {"model": "m", "preprocessing": "p"} | lineage
    return Moments(sites=sites, lineage=lineage, images=2, fingerprints=Fingerprints(ids=torch.tensor(ids)))


def same(a: SiteMoments, b: SiteMoments) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "moments.safetensors"
    save_moments(moments(system=True), path)
    return path


def test_moments_round_trip(saved: Path) -> None:
    got, expected = load_moments(saved), moments(system=True)
    assert list(got.sites) == list(expected.sites)
    assert all(same(got.sites[name], expected.sites[name]) for name in expected.sites)
    assert (got.images, got.lineage, got.image_ids.tolist()) == (2, expected.lineage, [1, 2])


@pytest.mark.parametrize("field", sorted(SYMMETRIC))
def test_collectors_symmetrise_the_sums(field: str) -> None:
    total_DD = move_to_host({field: random(2, 5, 5, seed=0)})[field]
    assert torch.equal(total_DD, total_DD.mT)
    assert torch.equal(total_DD.triu(), random(2, 5, 5, seed=0).triu())


def last_bit_differs(x_FF: Tensor) -> Tensor:
    x_FF[3, 1] = x_FF[3, 1].nextafter(torch.tensor(9.0, dtype=torch.float64))
    return x_FF


def signs_of_zero_differ(x_FF: Tensor) -> Tensor:
    x_FF[3, 1], x_FF[1, 3] = 0.0, -0.0
    return x_FF


@pytest.mark.parametrize("change", [last_bit_differs, signs_of_zero_differ])
def test_asymmetric_sum_is_stored_whole(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    site = replace(mlp(), gram_FF=change(mlp().gram_FF))
    save_moments(replace(moments(), sites={"blocks.0.mlp": site}), tmp_path / "m.safetensors")
    got = load_moments(tmp_path / "m.safetensors").sites["blocks.0.mlp"]
    assert isinstance(got, ChannelMoments)
    assert torch.equal(got.gram_FF.view(torch.int64), site.gram_FF.view(torch.int64))


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the file with changed tensors and matching digests."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["calib"])
    change(tensors)
    del header["header_sha256"]
    header |= {"sha256": {name: store._sha256(each) for name, each in tensors.items()}}
    save_file(tensors, path, metadata={"calib": store._signed(header)})


MLP_GRAM = "blocks.0.mlp/gram_FF:upper"


def set_to(value: Tensor, name: str = MLP_GRAM) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to(torch.ones(9).double()), r"gram_FF: \[9\] entries of a triangle, expected D"),
        (set_to(torch.ones(0).double()), r"gram_FF: \[0\] entries of a triangle"),
        (set_to(torch.tensor(3.0)), r"gram_FF: \[\] entries of a triangle"),
        (set_to(torch.ones(6).double()), r"gram_FF: got torch.float64 \[3, 3\]"),
        (set_to(mlp().gram_FF, MLP_GRAM.removesuffix(":upper")), "are not those of ChannelMoments"),
        (
            lambda tensors: tensors.update({"blocks.0.mlp/sum_F:upper": tensors.pop("blocks.0.mlp/sum_F")}),
            "are not those of ChannelMoments",
        ),
    ],
)
def test_malformed_triangles_are_refused(
    saved: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    rewritten(saved, change)
    with pytest.raises(BadInput, match=message):
        load_moments(saved).sites["blocks.0.mlp"]


def test_sites_are_read_lazily(saved: Path) -> None:
    """Damaged bytes of a site are found only when that site is read."""
    damaged(saved, "blocks.0.mlp/gram_FF:upper")
    got = load_moments(saved)
    assert isinstance(got.sites["blocks.0.attn"], HeadMoments)
    with pytest.raises(BadInput, match=r"blocks\.0\.mlp/gram_FF does not match its checksum"):
        got.sites["blocks.0.mlp"]


def damaged(path: Path, tensor: str) -> None:
    """Flip a bit of a tensor in the file."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + size])[tensor]["data_offsets"]
    content[8 + size + begin + 3] ^= 1
    path.write_bytes(content)


def rewritten_header(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    content = path.read_bytes()
    assert content.count(old) == 1, old
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated or foreign"),
        (lambda path: path.write_bytes(b"not a safetensors file at all"), "truncated or foreign"),
        (lambda path: path.write_bytes(b""), "truncated or foreign"),
        (lambda path: path.unlink(), "no such file"),
        (lambda path: save_file({"a": torch.zeros(1)}, path), "expected a calib.moments record, got a file"),
        (
            lambda path: save_file({"a": torch.zeros(1)}, path, metadata={"calib": '{"kind": 3}'}),
            "expected a calib.moments record, got '3'",
        ),
        (
            lambda path: rewritten_header(path, b'\\"version\\": 2', b'\\"version\\": 0'),
            "record of version 0; this tool reads version 2: run calibrate again",
        ),
        (
            lambda path: rewritten_header(path, b'\\"model\\": \\"m\\"', b'\\"model\\": \\"n\\"'),
            "header does not match",
        ),
        (lambda path: damaged(path, "image_ids"), "image_ids does not match"),
    ],
)
def test_bad_files_are_refused(saved: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(saved)
    with pytest.raises(BadInput, match=message) as error:
        load_moments(saved)
    assert str(saved) in str(error.value)


def test_merge_unites_data_lineage() -> None:
    lineage = merge_moments(moments(ids=(1, 2), data="b", tool="x"), moments(ids=(3, 4), data="a", tool="x")).lineage
    assert lineage == {"model": "m", "preprocessing": "p", "data": "a+b", "tool": "x"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (moments(ids=(2, 3)), "1 of 2 images are in both"),
        (moments(ids=(3, 4), model="n"), "model differs, got 'm' and 'n'"),
        (moments(ids=(3, 4), preprocessing="q"), "preprocessing differs"),
        (moments(ids=(3, 4), system=True), "only one of the moments to merge has system_HTT"),
        (
            Moments(sites={"blocks.0.mlp": mlp()}, lineage=moments().lineage, images=1),
            r"in only one of them: blocks\.0\.attn",
        ),
    ],
)
def test_merge_refuses_incompatible_moments(other: Moments, message: str) -> None:
    rejects(message, merge_moments, moments(), other)


def test_impossible_moments_are_refused() -> None:
    rejects("tokens: got 0", replace, mlp(), tokens=0)
    rejects(r"gram_FF: got torch.float32 \[4, 4\]", replace, mlp(), gram_FF=mlp().gram_FF.float())
    rejects("at least one site", Moments, sites={}, lineage={}, images=1)
