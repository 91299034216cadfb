"""Windows, grids and mask units of hierarchies: statistics by window, costs, budgets, polishes; never images."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calib.collect import collect
from calib.moments import HeadMoments
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.modules import replaced
from corp_deploy.families.site_cost import site_costs
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.steps import Branch
from corp_deploy.planning.carry_out import reduce_as_asked
from corp_deploy.planning.latency_of_tokens import tokens_of_sites
from corp_deploy.planning.request import Budget, ReductionRequest
from corp_deploy.polish.linearised import linearised
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.streams import Pair
from tests import tiny
from tests.hierarchies import checkpoint, pixels
from tests.small_models import outputs
from tests.test_corp_windows import Rounded, upper

FINE = {"align_hidden": 8, "align_head": 8}
Slots = Iterator[tuple[list[int | None], list[int]]]


def grids_of(height: int, width: int, count: int) -> Slots:
    """MaxViT's: each of count x count tokens that are as far apart as may be."""
    for down in range(height // count):
        for right in range(width // count):
            every: list[int | None] = [
                (row * (height // count) + down) * width + column * (width // count) + right
                for row in range(count)
                for column in range(count)
            ]
            yield every, list(range(len(every)))


def windows_of(height: int, width: int, size: int) -> Slots:
    """Neighbours, None beyond the map; the slots that are asked."""
    for top in range(0, height, size):
        for left in range(0, width, size):
            every = [
                row * width + column if row < height and column < width else None
                for row in range(top, top + size)
                for column in range(left, left + size)
            ]
            yield every, [slot for slot, each in enumerate(every) if each is not None]


def units_of(tokens: int, size: int) -> Slots:
    """Hiera's: the tokens of a mask unit are as many apart as there are units."""
    units = tokens // size
    for unit in range(units):
        every: list[int | None] = [place * units + unit for place in range(size)]
        yield every, list(range(size))


def slots_of(site: HeadSite, tokens: int) -> Slots:
    """By what timm says of the model's windows, told by hand."""
    if site.windows is None:
        yield [*range(tokens)], [*range(tokens)]
        return
    plan = site.windows.plan
    if site.name.startswith("blocks."):
        yield from units_of(tokens, plan.window[0])
    elif site.name.endswith("attn_grid.attn"):
        yield from grids_of(*plan.grid, plan.window[0])
    else:
        yield from windows_of(*plan.grid, plan.window[0])


def counted_by_hand(site: HeadSite, x_BNC: Tensor) -> dict[str, Tensor]:
    """The sums over q and k by loops over images and windows."""
    names = ("q_sum_HD", "k_sum_HD", "qq_HDD", "kk_HDD", "kk_centred_HDD", "energy_HD", "system_HTT")
    sums = dict.fromkeys(names, torch.zeros(()).double())
    weight, bias = site.first.weight.double(), site.first.bias.double()
    filling = torch.zeros(x_BNC.shape[2]).double()
    if site.windows is not None and site.windows.filling_C is not None:
        filling = site.windows.filling_C.double()
    for x_NC in x_BNC:
        for every, asked in slots_of(site, len(x_NC)):
            rows = torch.stack([filling if token is None else x_NC[token] for token in every])
            q, k, _ = (rows @ weight.T + bias).view(len(every), 3, site.heads, -1).permute(1, 2, 0, 3)
            is_asked_n = torch.zeros(len(every)).double().index_fill_(0, torch.tensor(asked), 1.0)
            q = q * is_asked_n[:, None]
            left = len(every) // site.pooled
            q = torch.stack([q[:, place::left].amax(dim=1) for place in range(left)], dim=1)
            centred = k - k.mean(dim=1, keepdim=True)
            of_window = {
                "q_sum_HD": q.sum(dim=1),
                "k_sum_HD": k.sum(dim=1),
                "qq_HDD": q.mT @ q,
                "kk_HDD": k.mT @ k,
                "kk_centred_HDD": centred.mT @ centred,
                "energy_HD": q.square().sum(dim=1) * k.square().sum(dim=1),
                "system_HTT": upper(k.mT @ k)[:, :, None] * upper(q.mT @ q)[:, None, :],
            }
            sums = {name: sums[name] + each for name, each in of_window.items()}
    return sums


@torch.no_grad()
def rounded_(model: nn.Module, heard: dict[str, Tensor]) -> None:
    """Whole numbers for queries and keys; `heard` takes what comes to the attentions and to their projections."""
    for site in sites_of(model).heads:
        weight, whole = site.first.weight, Rounded(1.0, 2.0)
        least = weight.abs().kthvalue(weight.shape[1] - 3, dim=1, keepdim=True)[0]
        weight.copy_(weight.sign() * (weight.abs() > least))
        site.first.bias.round_()
        if site.windows is not None and site.windows.filling_C is not None:
            site.windows.filling_C.round_().clamp_(-2.0, 2.0)

        def enter(_: nn.Module, inputs: tuple[Tensor, ...], whole: Rounded = whole, at: str = site.name) -> Tensor:
            heard[at] = whole(inputs[0])
            return heard[at]

        def leave(_: nn.Module, inputs: tuple[Tensor, ...], at: str = site.name) -> None:
            heard[f"{at} z"] = inputs[0]

        site.module.register_forward_pre_hook(enter)
        site.last.register_forward_pre_hook(leave)


@pytest.mark.parametrize(
    ("form", "changes"),
    [("hiera", {}), ("maxvit_tf", {}), ("tiny_vit", {"img_size": 96, "window_sizes": [4, 4, 4, 2]})],
)
@torch.no_grad()
def test_statistics_are_those_of_a_loop_over_images_and_windows(form: str, changes: dict[str, object]) -> None:
    """Windows of powers of two, so that means of whole numbers are exact; 11 images, so that a piece is filled up."""
    model, heard = checkpoint(form, **changes).model, dict[str, Tensor]()
    model = replaced(model, {f"{site.name}.norm": Rounded(0.25, 4.0) for site in sites_of(model).heads})
    rounded_(model, heard)
    images = pixels(model, 11)
    moments = collect(model, calibration_taps(model, sites_of(model)), [images], device="cpu", attention_system=True)
    outputs(model, images)
    for site in sites_of(model).heads:
        statistics, z_BNC = moments.sites[site.name], heard[f"{site.name} z"].double()
        assert isinstance(statistics, HeadMoments)
        exact = counted_by_hand(site, heard[site.name].double())
        exact |= {"z_sum_C": z_BNC.sum(dim=(0, 1)), "zz_CC": sum(z_NC.T @ z_NC for z_NC in z_BNC)}
        for name, total in exact.items():
            assert float((getattr(statistics, name) - total).norm()) < 1e-9 * float(total.norm()), (site.name, name)
        assert (statistics.images, statistics.tokens) == (11, z_BNC.shape[:2].numel())
    sites = sites_of(model).heads
    assert len({site.pooled for site in sites}) == (2 if form == "hiera" else 1)
    assert any(site.windows is not None and site.windows.pads for site in sites) == (form == "tiny_vit")


def multiply_adds(model: nn.Module) -> int:
    """Of one image by hand: layers by what they give, dot products by who asks whom."""
    total: int = 0

    def heard(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal total
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        total += out.numel() * layer.weight[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(heard) for layer in layers]
    tokens = dict[str, int]()
    for site in sites_of(model).heads:
        handles.append(
            site.module.register_forward_pre_hook(
                lambda _, inputs, at=site.name: tokens.__setitem__(at, inputs[0].shape[1])
            )
        )
    outputs(model, pixels(model, 1))
    for handle in handles:
        handle.remove()
    for site in sites_of(model).heads:
        for every, _ in slots_of(site, tokens[site.name]):
            core = site.qk + site.v if site.geometry == "ragged" else 2 * max(site.qk, site.v)
            total += len(every) // site.pooled * len(every) * site.heads * core
    return total


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["hiera", "maxvit_tf", "coatnet", "tiny_vit"])
def test_costs_count_windows_pooling_and_further_channels(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form)
    model = dense.model
    images = tiny.opened(tmp_path / "images.npy", pixels(model, 16).numpy(), model)
    moments = calibrate(dense, images, batch_size=8)
    before, costs = multiply_adds(model), site_costs(model, "macs")
    method = method_from_preset("best", **FINE)
    for site in sites_of(model).every[::2]:
        width = kind_of(site).widths(site, method)[0]
        narrower = reduce(model, moments, method, widths={site.name: width}).model
        assert costs.now[site.name] - costs.of(site, width, "padded") == before - multiply_adds(narrower) > 0
    asked = ReductionRequest(preset="best", method=method, budget=Budget(currency="macs", share=0.8))
    reduction, _ = reduce_as_asked(dense, moments, asked, images=images)
    assert 0.7 < multiply_adds(reduction.model) / before <= 0.8


@pytest.mark.parametrize("form", ["maxvit_pm", "efficientformer", "efficientformer_v2"])
def test_costs_by_formula_are_those_counted(form: str) -> None:
    model = checkpoint(form).model
    assert sum(site_costs(model, "macs").now.values()) < multiply_adds(model)
    assert site_costs(model, "params").now


def test_a_layer_alone_takes_the_tokens_that_reach_it() -> None:
    """Also where it gives fewer."""
    model = checkpoint("hiera").model
    tokens, method = tokens_of_sites(model), method_from_preset("best", **FINE)
    given = []
    for site in sites_of(model).heads:
        layer = kind_of(site).layer(site, site.module, method, kind_of(site).widths(site, method)[0])
        x_BNC = torch.zeros(3, tokens[site.name], site.first.in_features)
        given.append(tuple(layer(x_BNC).shape[1:]))
    assert given == [(256, 16), (64, 32), (64, 32), (16, 64), (4, 128)]
    assert "queries of 4 pooled" in sites_of(model).heads[1].outline("square")


@pytest.mark.parametrize(("form", "name"), [("hiera", "blocks.3.attn"), ("coatnet", "stages.1.blocks.0.attn")])
def test_a_step_of_the_first_layer_is_the_derivative(form: str, name: str) -> None:
    """What a polish by least squares takes an attention for that gives fewer tokens of more channels, against torch's
    own derivative; of the values alone where queries are pooled.
    """
    model = checkpoint(form).model.double()
    (branch,) = (step for step in family_of(model).steps(model) if step.name == name)
    assert isinstance(branch, Branch)
    site = sites_of(model).linear_by_name[name]
    assert isinstance(site, HeadSite)
    assert branch.shortcut is not None
    generator = torch.Generator().manual_seed(3)
    shape = (64, 32) if form == "hiera" else (256, 16)
    x_BNC = torch.randn(2, *shape, generator=generator).double()
    dense_BNC = branch(x_BNC) + 1.0
    (lacking,) = linearised(branch, site, [Pair(dense=dense_BNC, reduced=x_BNC, held_out=False)])
    weight, bias = site.first.weight, site.first.bias
    step_RD = torch.randn(len(weight), weight.shape[1] + 1, generator=generator).double()
    if site.keeps_qk:
        step_RD[: 2 * site.heads * site.qk] = 0.0

    def run(weight: Tensor, bias: Tensor) -> Tensor:
        changed = {"qkv.weight": weight, "qkv.bias": bias}
        return torch.func.functional_call(branch.layer, changed, (branch.norm(x_BNC),))  # type: ignore[no-any-return]

    site.module.fused = False  # type: ignore[assignment]  # whose derivative torch has both ways, its softmax float32
    _, exact = torch.autograd.functional.jvp(run, (weight, bias), (step_RD[:, :-1], step_RD[:, -1]))
    assert isinstance(exact, Tensor)
    exact = exact if site.windows is None else site.windows.leaving.slots(exact)
    moved_XO = lacking.tangent.along(step_RD)
    torch.testing.assert_close(moved_XO, exact.flatten(0, 1), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(lacking.lacking_XO, torch.ones_like(moved_XO), rtol=1e-6, atol=1e-6)
    out_XO = torch.randn(moved_XO.shape, generator=generator).double()
    product = (moved_XO * out_XO).sum()
    transposed = (lacking.tangent.sensitivity(out_XO).mT @ lacking.tangent.entering_XD * step_RD).sum()
    torch.testing.assert_close(product, transposed, rtol=1e-9, atol=1e-9)


def test_a_step_of_a_first_layer_is_the_derivative_through_a_convolution() -> None:
    """Of each hidden channel by itself, over its neighbours."""
    model = checkpoint("efficientformer_v2").model.double()
    name = "stages.1.blocks.0.mlp"
    (branch,) = (step for step in family_of(model).steps(model) if step.name == name)
    assert isinstance(branch, Branch)
    site = sites_of(model).linear_by_name[name]
    generator = torch.Generator().manual_seed(3)
    x_BNC = torch.randn(2, 64, 24, generator=generator).double()
    dense_BNC = branch(x_BNC) + 1.0
    (lacking,) = linearised(branch, site, [Pair(dense=dense_BNC, reduced=x_BNC, held_out=False)])
    weight, bias = site.first.weight, site.first.bias
    step_RD = torch.randn(len(weight), weight.shape[1] + 1, generator=generator).double()

    def run(weight: Tensor, bias: Tensor) -> Tensor:
        changed = {"fc1.weight": weight, "fc1.bias": bias}
        given: Tensor = torch.func.functional_call(branch.layer, changed, (x_BNC,))
        return given if branch.scale_C is None else given * branch.scale_C

    _, exact = torch.autograd.functional.jvp(run, (weight, bias), (step_RD[:, :-1], step_RD[:, -1]))
    assert isinstance(exact, Tensor)
    moved_XO = lacking.tangent.along(step_RD)
    torch.testing.assert_close(moved_XO, exact.flatten(0, 1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lacking.lacking_XO, torch.ones_like(moved_XO), rtol=1e-9, atol=1e-9)
    out_XO = torch.randn(moved_XO.shape, generator=generator).double()
    transposed = (lacking.tangent.sensitivity(out_XO).mT @ lacking.tangent.entering_XD * step_RD).sum()
    torch.testing.assert_close((moved_XO * out_XO).sum(), transposed, rtol=1e-9, atol=1e-9)
