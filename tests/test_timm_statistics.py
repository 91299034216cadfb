"""Statistics of timm's models, counted by hand from timm's own modules."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import swin_transformer
from timm.models.eva import Eva
from torch import Tensor, nn

from calib.collect import collect
from calib.moments import ChannelMoments, HeadMoments
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import hooked_model
from corp_deploy.traced.models.sites import calibration_taps
from tests import tiny
from tests.timm_models import NUMERIC, VITS, checkpoint, library, moments, pixels

HEADS, DIMS = 3, 16


def heard(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """What enters a layer [X,F], image by image."""
    rows: list[Tensor] = []
    hooked = model.get_submodule(layer)
    handle = hooked.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].double().flatten(0, -2)))
    with torch.inference_mode():
        for image in images:
            model(image[None])
    handle.remove()
    return torch.cat(rows)


QUICK = ("class token", "maximum", "packed gate", "gate apart", "residual post-norm")
FORMS = [
    *QUICK,
    *(
        pytest.param(form, marks=(pytest.mark.slow("models"), *([] if form in NUMERIC else [pytest.mark.nightly])))
        for form in VITS
        if form not in (*QUICK, "norms inside")
    ),
]


@pytest.mark.parametrize("form", FORMS)
def test_channel_statistics_equal_a_loop_over_images(form: str) -> None:
    """To the rounding of a float32 model, whose products depend on how many images go through it at once."""
    theirs, images = library(form), pixels(checkpoint(form).model, 24)
    found = {name: each for name, each in moments(form).sites.items() if isinstance(each, ChannelMoments)}
    assert len(found) >= 2  # one layer may read several sites
    for name, statistics in found.items():
        x_XF = heard(theirs, name, images)
        assert statistics.tokens == len(x_XF)
        mean_F, second_FF = x_XF.mean(dim=0), x_XF.mT @ x_XF / len(x_XF)
        assert float((statistics.mean_F - mean_F).norm()) < 1e-6 * float(second_FF.trace().sqrt()), name
        assert float((statistics.second_FF - second_FF).norm()) < 1e-6 * float(second_FF.norm()), name


def parts_of(mask_Wnn: Tensor | None, window: int, slots: int) -> list[Tensor]:
    """The slots [m] of each part of a window whose tokens see each other, by timm's own mask."""
    if mask_Wnn is None:
        return [torch.arange(slots)]
    parts = {tuple(row_n.nonzero().flatten().tolist()) for row_n in mask_Wnn[window] == 0.0}
    return [torch.tensor(part) for part in sorted(parts)]


def windows_of(map_HWC: Tensor, window: tuple[int, int], shift: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each window of a map its rows [n,C], zeros beyond the map, and which of them are there [n]."""
    (height, width), channels = map_HWC.shape[:2], map_HWC.shape[2]
    for top in range(0, height, window[0]):
        for left in range(0, width, window[1]):
            rows, there = [], []
            for down in range(top, top + window[0]):
                for right in range(left, left + window[1]):
                    inside = down < height and right < width
                    row = map_HWC[(down + shift[0]) % height, (right + shift[1]) % width]
                    rows.append(row if inside else torch.zeros(channels).double())
                    there.append(float(inside))
            yield torch.stack(rows), torch.tensor(there).double()


def counted_by_hand(block: Any, maps_BHWC: Tensor) -> dict[str, Tensor]:
    """The sums over q and k by loops over images, windows and what of a window sees each other."""
    qkv, mask = block.attn.qkv, block.attn_mask
    sums = dict.fromkeys(("qq_HDD", "kk_HDD", "kk_centred_HDD", "energy_HD"), torch.zeros(()).double())
    for map_HWC in maps_BHWC:
        for number, (x_nC, there_n) in enumerate(windows_of(map_HWC, block.window_size, block.shift_size)):
            for part_m in parts_of(mask, number, len(x_nC)):
                rows = (x_nC[part_m] @ qkv.weight.T + qkv.bias).view(len(part_m), 3, block.attn.num_heads, -1)
                q, k, _ = rows.permute(1, 2, 0, 3)
                q = block.attn.scale * q * there_n[part_m, None]  # nobody asks what padding is like
                centred = k - k.mean(dim=1, keepdim=True)
                of_part = {
                    "qq_HDD": q.mT @ q,
                    "kk_HDD": k.mT @ k,
                    "kk_centred_HDD": centred.mT @ centred,
                    "energy_HD": q.square().sum(dim=1) * k.square().sum(dim=1),
                }
                sums = {name: sums[name] + each for name, each in of_part.items()}
    return sums


@pytest.mark.parametrize("form", ["windows", "padding"])
def test_window_statistics_equal_a_loop_over_images_and_windows(form: str) -> None:
    """11 images, so that a piece is filled up; as the dot product takes them, with their scale."""
    own, theirs = checkpoint(form).model, library(form).double()
    heard: dict[str, Tensor] = {}
    for name, block in theirs.named_modules():
        if isinstance(block, swin_transformer.SwinTransformerBlock):
            block.norm1.register_forward_hook(lambda _, __, out, name=name: heard.__setitem__(name, out))
    images = pixels(own, 11)
    theirs(images.double())
    moments = collect(hooked_model(own), calibration_taps(own, sites_of(own)), [images], device="cpu")
    assert len(heard) == 4
    for name, maps_BHWC in heard.items():
        statistics = moments.sites[f"{name}.attn.qk"]
        assert isinstance(statistics, HeadMoments)
        for each, exact in counted_by_hand(theirs.get_submodule(name), maps_BHWC).items():
            assert float((getattr(statistics, each) - exact).norm()) < 1e-5 * float(exact.norm()), (name, each)


def by_timm(eva: Eva, index: int, image: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [H,N,D] as they enter the dot product of a block."""
    heard: dict[str, Tensor] = {}
    attention: Any = eva.get_submodule(f"blocks.{index}.attn")
    handles = [
        attention.get_submodule(name).register_forward_hook(
            lambda _, inputs, out, name=name: heard.__setitem__(name, out)
        )
        for name in ("q_norm", "k_norm")
    ]
    eva(image[None])
    for handle in handles:
        handle.remove()
    tables: Any = eva._pos_embed(eva.patch_embed(image[None]))[1]
    table = tables[index] if eva.rope_mixed else tables
    prefix = eva.num_prefix_tokens
    q, k = (
        torch.cat([x[0, :, :prefix], apply_rot_embed_cat(x[0, :, prefix:], table, half=attention.rotate_half)], dim=1)
        for x in (heard["q_norm"], heard["k_norm"])
    )
    return q, k


@pytest.mark.parametrize(
    "form", ["neighbours turned, packed gate", "turned, norms inside", "halves turned, registers", "learned angles"]
)
def test_plane_statistics_equal_a_loop_over_images(form: str) -> None:
    """To the rounding of float32; dimensions p and P + p are a plane, whichever timm's are."""
    raw, halves = library(form), form.startswith("halves")
    assert isinstance(raw, Eva)
    order = torch.arange(DIMS) if halves else torch.cat((torch.arange(0, DIMS, 2), torch.arange(1, DIMS, 2)))
    pixels = torch.from_numpy(tiny.images(24))
    for index in (0, 1):
        taken = moments(form).sites[f"blocks.{index}.attn.qk"]
        assert isinstance(taken, HeadMoments)
        qq, kk = torch.zeros(2, HEADS, DIMS, DIMS, dtype=torch.float64)
        energy = torch.zeros(HEADS, DIMS, dtype=torch.float64)
        with torch.inference_mode():
            for image in pixels:
                both = (each.double() for each in by_timm(raw, index, image))
                for head, (q, k) in enumerate(zip(*both, strict=True)):
                    q_ND, k_ND = q[:, order], k[:, order]
                    centred_ND = k_ND - k_ND.mean(dim=0)
                    qq[head] += q_ND.T @ q_ND
                    kk[head] += centred_ND.T @ centred_ND
                    energy[head] += q_ND.square().sum(dim=0) * k_ND.square().sum(dim=0)
        for name, exact in (("qq_HDD", qq), ("kk_centred_HDD", kk), ("energy_HD", energy)):
            got = getattr(taken, name)
            assert float((got - exact).norm()) < 1e-6 * float(exact.norm()), name
