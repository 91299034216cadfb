"""timm's models whose attention is told where tokens are, with redundancy planted at every site, and their statistics
counted by hand from timm's own modules.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import Eva
from torch import Tensor

from calib.hooks import listening
from calib.sites import Role
from corp_deploy.families.family import sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.rotary import LearnedRotary
from corp_deploy.families.timm_eva_blocks import with_placed_blocks
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from tests import tiny
from tests.placed_forms import FORMS, ROTARY, checkpoint, dense, moments, relative
from tests.test_corp_timm_planted import plant_channels_, plant_heads_
from tests.vit_forms import method, opened

HEADS, PLANES = 3, 8


def plant_planes_(site: HeadSite) -> None:
    """Of half of the planes of a head, others in each, the queries are 0; where angles are learned, they turn as the
    other half does and are those times complex numbers. Values are mixes of each other.
    """
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(8, 8, generator=generator) / 8**0.5
    for rows in filter(lambda each: each is not None, (site.first.weight, site.first.bias)):
        by_head = rows.view(3, HEADS, 2, PLANES, -1)
        values = rows.view(3, HEADS, 2 * PLANES, -1)[2]
        if not site.keeps_v:
            values[:, 8:] = mix @ values[:, :8]
        if site.keeps_qk:
            continue
        for head in range(HEADS):
            order = torch.randperm(PLANES, generator=torch.Generator().manual_seed(head))
            stay, go = order[:4], order[4:]
            if isinstance(site.rotary, LearnedRotary):
                site.rotary.freqs_2HP[:, head, go] = site.rotary.freqs_2HP[:, head, stay]
                for part, (a, b) in enumerate(((0.6, -0.8), (1.1, 0.3))):
                    one, other = by_head[part, head][:, stay]
                    by_head[part, head, 0, go], by_head[part, head, 1, go] = a * one - b * other, b * one + a * other
            else:
                by_head[0, head][:, go] = 0.0


def planted(form: str) -> Checkpoint:
    whole = checkpoint(form)
    model = copy.deepcopy(whole.model).requires_grad_(False)
    for channels in sites_of(model).channels:
        plant_channels_(channels)
    for heads in sites_of(model).heads:
        if heads.rotary is None:
            plant_heads_(heads)
        else:
            plant_planes_(heads)
    return replace(whole, model=model)


@pytest.mark.parametrize("form", FORMS)
def test_planted_redundancy_goes_at_no_loss(form: str) -> None:
    """`best` at half the width everywhere."""
    whole = planted(form)
    taken = calibrate(whole, opened(whole.model, 48), batch_size=8)
    narrower = reduce(whole.model, taken, method(geometry="square")).model
    for site in sites_of(narrower).channels:
        assert site.width < FORMS[form][1]["embed_dim"] * 3
    for heads in sites_of(narrower).heads:
        assert (heads.qk, heads.v) == (16 if heads.keeps_qk else 8, 16 if heads.keeps_v else 8)
    assert relative(narrower, whole.model) < 1e-3


def by_timm(eva: Eva, index: int, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [H,N,D] as they enter the dot product of a block, and what enters its projection [N,C]."""
    heard: dict[str, Tensor] = {}
    attention: Any = eva.get_submodule(f"blocks.{index}.attn")
    handles = [
        attention.get_submodule(name).register_forward_hook(
            lambda _, inputs, out, name=name: heard.__setitem__(name, out)
        )
        for name in ("q_norm", "k_norm")
    ]
    handles.append(attention.proj.register_forward_pre_hook(lambda _, inputs: heard.__setitem__("z", inputs[0])))
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
    return q, k, heard["z"][0]


@pytest.mark.parametrize("form", ROTARY)
def test_what_is_summed_is_what_timm_multiplies(form: str) -> None:
    """In float64, but for learned angles, which timm has in float32; its dimensions are put in the order of ours."""
    raw = copy.deepcopy(dense(form)[0]).double()
    assert isinstance(raw, Eva)
    ours, limit = with_placed_blocks(copy.deepcopy(raw)), 1e-6 if raw.rope_mixed else 1e-9
    heard: dict[tuple[str, str], Tensor] = {}

    def hear(site: str, role: Role, activation: Tensor) -> None:
        heard[site, role] = activation[0]

    neighbours = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    with torch.inference_mode():
        for image in torch.from_numpy(tiny.images(3)).double():
            with listening([site.taps() for site in sites_of(ours).heads], hear):
                ours(image[None])
            for name in {site for site, _ in heard}:
                index = int(name.split(".")[1])
                attention: Any = raw.get_submodule(name)
                order = torch.arange(16) if attention.rotate_half else neighbours
                q, k, z = by_timm(raw, index, image)
                for role, exact in (("q", q[..., order]), ("k", k[..., order]), ("z", z)):
                    assert float((heard[name, role] - exact).norm()) < limit * float(exact.norm()), (name, role)


@pytest.mark.parametrize("form", ["neighbours turned, packed gate", "learned angles"])
def test_statistics_are_those_of_a_loop_over_images(form: str) -> None:
    """To the rounding of float32; timm's dimensions in the order of ours."""
    raw, ours = dense(form)
    assert isinstance(raw, Eva)
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    pixels = next(iter(opened(ours.model).batches(24)))
    for index, site in enumerate(sites_of(ours.model).heads):
        taken = moments(form).sites[site.name]
        qq, kk = torch.zeros(HEADS, 16, 16, dtype=torch.float64), torch.zeros(HEADS, 16, 16, dtype=torch.float64)
        energy, zz = torch.zeros(HEADS, 16, dtype=torch.float64), torch.zeros(48, 48, dtype=torch.float64)
        with torch.inference_mode():
            for image in pixels:
                q, k, z = (each.double() for each in by_timm(raw, index, image))
                for head in range(HEADS):
                    q_ND, k_ND = q[head][:, order], k[head][:, order]
                    centred_ND = k_ND - k_ND.mean(dim=0)
                    qq[head] += q_ND.T @ q_ND
                    kk[head] += centred_ND.T @ centred_ND
                    energy[head] += q_ND.square().sum(dim=0) * k_ND.square().sum(dim=0)
                zz += z.T @ z
        for name, exact in (("qq_HDD", qq), ("kk_centred_HDD", kk), ("energy_HD", energy), ("zz_CC", zz)):
            assert float((getattr(taken, name) - exact).norm()) < 1e-6 * float(exact.norm()), name
