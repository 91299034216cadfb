"""A norm between all heads and the output projection (BEiT-3): queries and keys are reduced, values stay."""

import pytest
import torch

from corp_deploy.families.family import sites_of
from corp_deploy.families.head_attention import HeadAttention
from corp_deploy.families.widths import HeadGeometry, HeadWidths
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.model import notes_on, reduce, uniform_widths
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput
from tests import tiny
from tests.vit_forms import architecture, checkpoint, method, moments, opened

FORM = "norms inside"


@pytest.mark.parametrize("geometry", ["padded", "square", "ragged"])
def test_values_stay(geometry: HeadGeometry) -> None:
    dense, asked = checkpoint(FORM).model, method(geometry=geometry)
    assert uniform_widths(dense, asked) == {f"blocks.{index}.attn": HeadWidths(qk=8, v=16) for index in (0, 1)}
    narrower = reduce(dense, moments(FORM), asked).model
    for before, after in zip(sites_of(dense).heads, sites_of(narrower).heads, strict=True):
        assert after.keeps_v
        assert not after.keeps_qk
        assert torch.equal(after.first.weight[-48:], before.first.weight[-48:])
        assert torch.equal(after.last.weight, before.last.weight)
        for name, value in before.module.get_submodule("norm").state_dict().items():
            assert torch.equal(after.module.get_submodule("norm").state_dict()[name], value)
    notes = notes_on(sites_of(dense), asked, uniform_widths(dense, asked))
    assert sum("keeps V: a LayerNorm before the output projection" in note for note in notes) == 2
    assert sum("between the linear layers mixes all hidden channels" in note for note in notes) == 2


def test_planted_queries_and_keys_are_found() -> None:
    """Of each head's 16 dimensions the second half are mixes of the first."""
    torch.manual_seed(0)
    model = tiny.checkpoint(scale_attn_norm=True).model.requires_grad_(False)
    mix = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 8**0.5
    for site in sites_of(model).heads:
        for half in (site.first.weight.view(3, 3, 16, -1)[:2], site.first.bias.view(3, 3, 16, 1)[:2]):
            half[:, :, 8:] = mix @ half[:, :, :8]
    dense = Checkpoint(model=model, architecture=architecture("class token", scale_attn_norm=True), lineage={})
    taken = calibrate(dense, opened(model), batch_size=8)
    narrower = reduce(model, taken, method(mlp_sparsity=None)).model
    assert {(site.qk, site.v) for site in sites_of(narrower).heads} == {(8, 16)}
    images = torch.from_numpy(tiny.images(5, seed=3))
    with torch.inference_mode():
        exact = model(images)
        assert float((narrower(images) - exact).norm() / exact.norm()) < 1e-3


def test_the_norm_is_between_heads_and_projection() -> None:
    """By hand, with loops over heads."""
    dense = checkpoint(FORM).model
    site = sites_of(dense).heads[0]
    module = site.empty(qk=16, v=16, geometry="square")
    module.load_state_dict(site.module.state_dict())
    assert isinstance(module, HeadAttention)
    x_NC = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).double()
    module.double(), module.requires_grad_(False)
    q, k, v = (part.view(5, 3, 16) for part in module.qkv(x_NC).split(48, dim=-1))
    heads = [((q[:, h] @ k[:, h].T) * 16**-0.5).softmax(dim=-1) @ v[:, h] for h in range(3)]
    exact = module.proj(module.norm(torch.cat(heads, dim=-1)))
    torch.testing.assert_close(module(x_NC[None])[0], exact)


def test_no_step_is_solved_through_the_norm() -> None:
    dense = checkpoint(FORM).model
    narrower = reduce(dense, moments(FORM), method()).model
    with pytest.raises(BadInput, match="norm behind their heads"):
        polished(dense, narrower, opened(dense), PolishOptions(how="layer"))
