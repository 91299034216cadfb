"""Counts of MACs and parameters against formulas written by hand and against torch's counter."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from corp_deploy.families import timm_library
from corp_deploy.families.counting import count_macs, count_products, macs, parameters, site_costs
from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.traced.models.module import replace_submodules
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.models.sites import Currency
from ground.ports import Port, image_port
from perf.parity.tolerance import exact_tolerance
from tests import timm_models, tiny


def hand_macs(
    dim: int, depth: int, *, tokens: int = 197, patches: int = 196, patch: int = 16, classes: int = 1000
) -> int:
    """Sum the MACs of the patch embedding, of each block (q, k, v, Q K', A V, proj, fc1, fc2) and of the head."""
    per_block = 3 * tokens * dim * dim + 2 * tokens * tokens * dim + tokens * dim * dim + 2 * tokens * dim * (4 * dim)
    return patches * (3 * patch * patch) * dim + depth * per_block + dim * classes


def hand_parameters(dim: int, depth: int, *, tokens: int = 197, patch: int = 16, classes: int = 1000) -> int:
    norms = 2 * 2 * dim
    per_block = (
        norms + (3 * dim * dim + 3 * dim) + (dim * dim + dim) + (4 * dim * dim + 4 * dim) + (4 * dim * dim + dim)
    )
    embedding = 3 * patch * patch * dim + dim + dim + tokens * dim
    return embedding + depth * per_block + 2 * dim + dim * classes + classes


def on_meta(name: str, **kwargs: Any) -> nn.Module:
    """Return a timm model on the meta device, which has shapes but no weights."""
    with torch.device("meta"):
        return dense_from_architecture(Architecture(name=name, kwargs=kwargs))


def test_macs_do_not_depend_on_precision() -> None:
    model = tiny.checkpoint().model
    expected = macs(model)
    half = replace_submodules(model, {}).half()
    assert macs(half) == expected
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}


@pytest.mark.parametrize(
    ("name", "dim", "gmacs"),
    [
        ("deit_tiny_patch16_224", 192, 1.25),
        ("deit_small_patch16_224", 384, 4.60),
        ("deit_base_patch16_224", 768, 17.56),
    ],
)
def test_deit_equals_the_hand_written_formula(name: str, dim: int, gmacs: float) -> None:
    model = on_meta(name)
    assert macs(model) == hand_macs(dim, 12)
    assert round(macs(model) / 1e9, 2) == gmacs
    assert parameters(model) == hand_parameters(dim, 12)


def torchs_macs(model: nn.Module) -> int:
    """Return half the floating-point operations that torch's counter finds."""
    shape = image_spec(model).shape
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.requires_grad_(False)(torch.empty(1, *shape, device="meta"))
    return int(counter.get_total_flops()) // 2


FORMS = (
    "class token", "distilled", "norm before", "attention pool", "attention pool without weights", "gate apart",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{form: timm_models.VITS[form] for form in FORMS},
    "hybrid r26": ("vit_small_r26_s32_224", {}),
    "mobile stem": ("vit_base_mci_224", {}),
    "4 channels, oblong": ("vit_tiny_patch16_224", {"in_chans": 4, "img_size": (64, 128)}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_mac_count_equals_torchs(family: str) -> None:
    name, kwargs = FAMILIES[family]
    model = on_meta(name, **kwargs | {"depth": 2})
    found = inspection_of_model(model)
    assert found["macs"] == macs(model) == torchs_macs(model)
    rows = found["sites"] + found["fixed"]
    assert sum(row["macs"] for row in rows) == found["macs"]
    assert sum(row["parameters"] for row in rows) == found["parameters"] == sum(p.numel() for p in model.parameters())
    assert all(row["macs"] > 0 for row in found["sites"]), found["sites"]


@pytest.mark.parametrize("currency", ["macs", "params"])
def test_predicted_macs_equal_the_count_of_the_narrowed_model(currency: Currency) -> None:
    model = on_meta("vit_base_patch16_siglip_224", depth=2, embed_dim=192, num_heads=3)
    costs, found = site_costs(model, currency), sites_of(model).every
    widths = {site.name: 100 if site.name.endswith("mlp") else 3 * 32 for site in found}
    reduced = at_widths(model, widths)
    after = site_costs(reduced, currency).now
    for site in found:
        if site.name.endswith("mlp"):
            assert after[site.name] == costs.of(site, 100), site.name
    count = macs if currency == "macs" else parameters
    saved = sum(costs.now[site.name] - costs.of(site, widths[site.name]) for site in found)
    assert count(model) - count(reduced) == saved
    if currency == "macs":
        assert macs(reduced) == torchs_macs(reduced)


@pytest.mark.parametrize("wrapped", [torch.no_grad, torch.inference_mode])
def test_counting_leaves_the_model_unchanged(wrapped: Callable[[], Any]) -> None:
    model = tiny.checkpoint().model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with wrapped():
        found = count_macs(model)
    assert found.macs == torchs_macs(on_meta(tiny.ARCHITECTURE.name, **tiny.ARCHITECTURE.kwargs))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_float32_bound_accounts_for_convolutions() -> None:
    """ONNX Runtime was 1.8e-5 off after fifty convolutions, which the first bound, 3.7e-5, allows."""
    bounds = [
        exact_tolerance(products=count_macs(on_meta(name, depth=2)).chain, largest_logit=0.0).max_relative_error
        for name in ("vit_base_r50_s16_224", "vit_base_patch16_224")
    ]
    assert bounds == [10 * 2**-24 * 62, 10 * 2**-24 * 14]


def test_depth_is_the_longest_chain_of_products() -> None:
    """A block has six products in a row: qkv, Q K', A V, proj, fc1, fc2; the patch embedding and the head add two."""
    assert count_macs(on_meta("vit_tiny_patch16_224", depth=3)).chain == 1 + 3 * 6 + 1
    branches = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))])

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = branches

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((branch(x) for branch in self.branches), start=x)

    found = count_products(Forked(), (Port(name="x", shape=(4,)),))
    assert (found.chain, found.macs) == (2, 48)
    assert found.within("branches.1") == 32
    assert count_products(nn.ConvTranspose2d(3, 5, 2, stride=2), (image_port((3, 4, 4)),)).macs == 3 * 4 * 4 * 5 * 2 * 2
    assert count_products(nn.Conv2d(4, 6, 3, groups=2), (image_port((4, 5, 5)),)).macs == 6 * 3 * 3 * 2 * 3 * 3


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "swinv2_tiny_window8_256", "maxvit_pico_rw_256"])
def test_model_on_meta_is_counted_like_one_with_weights(name: str) -> None:
    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
    assert timm_library._size(Architecture(name=name)) == expected


def test_initialisation_outside_meta_is_unchanged() -> None:
    with timm_library._Unfilled():  # type: ignore[no-untyped-call]
        assert torch.empty(3, device="meta").normal_().mul_(5).unsqueeze_(0).shape == (1, 3)
        assert torch.full((3,), 2.0).mul_(5).tolist() == [10.0] * 3


def test_cached_operator_shapes_are_correct() -> None:
    """Inputs of another size and operators of other arguments, such as the padding, get shapes of their own."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
    for side in (4, 5, 4):
        assert count_products(model.eval(), (image_port((3, side, side)),)).shapes == ((4 * side * side,),)
    for padding, expected in ((1, 4 * 16 * 27), (0, 4 * 4 * 27), (1, 4 * 16 * 27)):
        assert count_products(nn.Conv2d(3, 4, 3, padding=padding), (image_port((3, 4, 4)),)).macs == expected
