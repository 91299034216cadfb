"""timm's Eva with redundancy planted where it is reduced, and its statistics counted by hand from its own modules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import Eva
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.families.model_cost import macs
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from tests import tiny
from tests.eva_models import FORMS, PLAIN, checkpoint, library, moments
from tests.small_models import error
from tests.vit_forms import method, opened

HEADS, DIMS, PLANES = 3, 16, 8
MIX = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 8**0.5


def plant_values_(rows: Tensor) -> None:
    """The second half of each head's dimensions are mixes of the first."""
    by_head = rows.view(-1, DIMS, *rows.shape[1:])
    by_head[:, 8:] = torch.einsum("de,he...->hd...", MIX, by_head[:, :8])


def plant_planes_(queries: Tensor, form: str) -> None:
    """Half of each head's planes, others in each, are 0."""
    by_head = queries.view(HEADS, DIMS, -1)
    for head in range(HEADS):
        gone = torch.randperm(PLANES, generator=torch.Generator().manual_seed(head))[:4]
        halves = form.startswith("halves")
        dims = (gone, gone + PLANES) if halves else (2 * gone, 2 * gone + 1)
        by_head[head, torch.cat(dims)] = 0.0


def planted(form: str) -> Checkpoint:
    """The second half of an MLP's channels are copies of the first."""
    own = checkpoint(form)
    model = dense_from_architecture(own.architecture)
    state = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    for name, tensor in state.items():
        block, inside, _ = name.partition(".mlp.fc1")
        if inside and form != "norms inside":
            for part in tensor.split(state[f"{block}.mlp.fc2.weight"].shape[1]):  # gates, then what they gate
                part[len(part) // 2 :] = part[: len(part) // 2]
        if ".attn." not in name or "norm" in name:
            continue
        parts = dict(zip("qkv", tensor.chunk(3), strict=True)) if ".qkv." in name else {}
        parts |= {part: tensor for part in "qkv" if f".{part}_proj." in name or f".{part}_bias" in name}
        if "v" in parts and form != "norms inside":
            plant_values_(parts["v"])
        for part in set(parts) & set("qk") if form in PLAIN else ():
            plant_values_(parts[part])
        if "q" in parts and form not in (*PLAIN, "q/k norm, groups"):
            plant_planes_(parts["q"], form)
    model.load_state_dict(state)
    return replace(own, model=model.requires_grad_(False))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "attention pool"])
def test_planted_redundancy_goes_at_no_loss(form: str) -> None:
    """`best` at half the width everywhere."""
    whole = planted(form)
    taken = calibrate(whole, opened(whole.model, 48), batch_size=8)
    narrower = reduce(whole.model, taken, method(geometry="square")).model
    assert macs(narrower) < (0.95 if form == "norms inside" else 0.75) * macs(whole.model)
    assert error(narrower, whole.model, torch.from_numpy(tiny.images(5, 3))) < 1e-3


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
    "form", ["neighbours turned, packed gate", "norms inside", "halves turned, registers", "learned angles"]
)
def test_statistics_are_those_of_a_loop_over_images(form: str) -> None:
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
                for head, (q, k) in enumerate(
                    zip(*(each.double() for each in by_timm(raw, index, image)), strict=True)
                ):
                    q_ND, k_ND = q[:, order], k[:, order]
                    centred_ND = k_ND - k_ND.mean(dim=0)
                    qq[head] += q_ND.T @ q_ND
                    kk[head] += centred_ND.T @ centred_ND
                    energy[head] += q_ND.square().sum(dim=0) * k_ND.square().sum(dim=0)
        for name, exact in (("qq_HDD", qq), ("kk_centred_HDD", kk), ("energy_HD", energy)):
            got = getattr(taken, name)
            assert float((got - exact).norm()) < 1e-6 * float(exact.norm()), name
