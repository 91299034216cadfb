"""Attention in windows in budgets, latency tables, halves of images and polishes; windows are never images."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calib.collect import collect
from calib.combination import added
from calib.moments import HeadMoments
from calib.sites import HeadTaps, Tap
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_site import HeadSite
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
from ground.errors import BadInput
from tests import tiny
from tests.small_models import outputs
from tests.windowed_models import FORMS, NORMS_IN_FRONT, checkpoint, pixels

FINE = {"align_hidden": 8, "align_head": 8}


def multiply_adds(model: nn.Module) -> int:
    """Of one image by hand: layers by what they give, dot products by windows."""
    total: int = 0

    def linear(layer: nn.Linear, _: object, out: Tensor) -> None:
        nonlocal total
        total += out.numel() * layer.in_features

    handles = [layer.register_forward_hook(linear) for layer in model.modules() if isinstance(layer, nn.Linear)]
    outputs(model, pixels(model, 1))
    for handle in handles:
        handle.remove()
    patches = model.state_dict()["patch_embed.proj.weight"]
    _, height, width = family_of(model).input_spec(model).shape
    total += patches.numel() * (height // 4) * (width // 4)
    for site in sites_of(model).heads:
        assert site.windows is not None
        rows, columns = site.windows.plan.window
        across, down = (
            -(-size // window) for size, window in zip(site.windows.plan.grid, (rows, columns), strict=True)
        )
        core = 2 * max(site.qk, site.v)
        total += across * down * (rows * columns) ** 2 * site.heads * core
    return int(total)


@pytest.mark.parametrize("form", FORMS)
def test_costs_count_windows_and_their_padding(form: str, tmp_path: Path) -> None:
    dense = checkpoint(form)
    model = dense.model
    images = tiny.opened(tmp_path / "images.npy", pixels(model, 24).numpy(), model)
    moments = calibrate(dense, images, batch_size=8)
    before, costs = multiply_adds(model), site_costs(model, "macs")
    for site in sites_of(model).every[::3]:
        width = kind_of(site).widths(site, method_from_preset("best", **FINE))[0]
        narrower = reduce(model, moments, method_from_preset("best", **FINE), widths={site.name: width}).model
        assert costs.now[site.name] - costs.of(site, width, "padded") == before - multiply_adds(narrower) > 0


def test_a_budget_is_met(tmp_path: Path) -> None:
    dense = checkpoint("padding")
    model = dense.model
    images = tiny.opened(tmp_path / "images.npy", pixels(model, 24).numpy(), model)
    moments = calibrate(dense, images, batch_size=8)
    asked = ReductionRequest(
        preset="best", method=method_from_preset("best", **FINE), budget=Budget(currency="macs", share=0.7)
    )
    reduction, _ = reduce_as_asked(dense, moments, asked, images=images)
    assert 0.6 < multiply_adds(reduction.model) / multiply_adds(model) <= 0.7


def test_a_layer_alone_takes_the_tokens_that_reach_it() -> None:
    """As latency tables time it, whatever its windows are padded to."""
    model = checkpoint("padding").model
    tokens = tokens_of_sites(model)
    assert {tokens[site.name] for site in sites_of(model).every} == {160, 40}
    for site in sites_of(model).heads:
        method = method_from_preset("best", **FINE)
        layer = kind_of(site).layer(site, site.module, method, kind_of(site).widths(site, method)[0])
        x_BNC = torch.zeros(3, tokens[site.name], site.first.in_features)
        assert layer(x_BNC).shape == x_BNC.shape
        assert not [name for name, _ in layer.named_parameters() if name.startswith("position_bias")], "a constant"
        assert site.outline("padded").endswith("windows of 4x7")


def test_halves_of_the_images_are_those_of_their_windows(tmp_path: Path) -> None:
    """Groups, pieces that are filled up and merged files: sums add up by image, never by window."""
    model = checkpoint("padding").model
    images, taps = pixels(model, 13), calibration_taps(model, sites_of(model))
    whole = collect(model, taps, [images], device="cpu", attention_system=True).sites
    parts = [collect(model, taps, [part], device="cpu", attention_system=True).sites for part in images.split([5, 8])]
    for site in sites_of(model).heads:
        both, statistics = added(site.name, *(part[site.name] for part in parts)), whole[site.name]
        assert isinstance(statistics, HeadMoments)
        assert isinstance(both, HeadMoments)
        assert (both.images, both.tokens) == (statistics.images, statistics.tokens)
        for name in ("qq_HDD", "kk_centred_HDD", "energy_HD", "system_HTT"):
            assert torch.allclose(getattr(both, name), getattr(statistics, name), rtol=1e-6), name


class Cut(nn.Module):
    """A layer that takes windows for a batch, as timm's and torchvision's attentions do: [B,N,C] -> [B*W,n,C]."""

    def __init__(self, windows: int) -> None:
        super().__init__()
        self.windows = windows
        self.q, self.k, self.proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.windows, -1)).flatten(0, 1)
        out: Tensor = self.proj(self.q(x) + self.k(x))
        pooled: Tensor = out.unflatten(0, (-1, self.windows)).flatten(1, 2).mean(dim=1)
        return pooled


def test_windows_can_not_be_taken_for_images() -> None:
    """Whatever the number of windows: images of a batch are in front of everything, or it is refused."""
    model = Cut(windows=4)
    tap = {name: Tap(module=model.get_submodule(name), take=lambda out: out[:, None]) for name in ("q", "k")}
    site = HeadTaps(name="attn", queries=tap["q"], keys=tap["k"], output=model.proj)
    with pytest.raises(
        BadInput, match=r"attn: q is .*\[32, 1, 4, 8\] for a batch of 8, expected .* the batch in front"
    ):
        collect(model, [site], [torch.randn(5, 16, 8)], device="cpu")

    def in_windows(out: Tensor) -> Tensor:
        apart: Tensor = out.unflatten(0, (-1, 4))
        return apart[:, :, None]

    cut = {name: Tap(module=each.module, take=in_windows) for name, each in tap.items()}
    site = HeadTaps(name="attn", queries=cut["q"], keys=cut["k"], output=model.proj)
    with pytest.raises(BadInput, match=r"attn: z is .*\[32, 4, 8\] for a batch of 8, expected .* the batch in front"):
        collect(model, [site], [torch.randn(5, 16, 8)], device="cpu")


def test_tokens_of_windows_have_no_weights_of_their_own() -> None:
    model = checkpoint("windows").model
    taps = calibration_taps(model, sites_of(model))
    heads = [each for each in taps if each.kind == "attention"][:1]
    with pytest.raises(BadInput, match="comes in windows, of whose tokens none may have a weight"):
        collect(model, heads, [pixels(model, 8)], device="cpu", token_weights=lambda inputs: torch.ones(8, 49))


@pytest.mark.parametrize("form", NORMS_IN_FRONT)
def test_a_step_of_the_first_layer_is_the_derivative_in_windows(form: str) -> None:
    """What a polish by least squares takes an attention for, against torch's own derivative."""
    model = checkpoint(form).model.double()
    branch = [step for step in family_of(model).steps(model) if isinstance(step, Branch)][2]
    site = sites_of(model).by_name[branch.name]
    assert isinstance(site, HeadSite)
    assert site.windows is not None
    generator = torch.Generator().manual_seed(3)
    x_BNC = torch.randn(2, site.windows.tokens, 32, generator=generator).double()
    pair = Pair(dense=x_BNC + 1.0, reduced=x_BNC, held_out=False)
    (lacking,) = linearised(branch, site, [pair])
    weight, bias = site.first.weight, site.first.bias
    step_RD = torch.randn(len(weight), weight.shape[1] + 1, generator=generator).double()

    def run(weight: Tensor, bias: Tensor) -> Tensor:
        changed = {"qkv.weight": weight, "qkv.bias": bias}
        return torch.func.functional_call(branch.layer, changed, (branch.norm(x_BNC),))  # type: ignore[no-any-return]

    site.module.fused = False  # type: ignore[assignment]  # whose derivative torch has both ways, its softmax float32
    behind, exact = torch.autograd.functional.jvp(run, (weight, bias), (step_RD[:, :-1], step_RD[:, -1]))
    assert any(site.windows.plan.shift)
    moved_BSC = lacking.tangent.along(step_RD).view(2, -1, 32)
    torch.testing.assert_close(site.windows.joined(site.windows.apart(moved_BSC)), exact, rtol=1e-4, atol=2e-5)
    lacking_BSC = lacking.lacking_XO.view(2, -1, 32)
    torch.testing.assert_close(
        site.windows.joined(site.windows.apart(lacking_BSC)), pair.dense - x_BNC - behind, rtol=1e-4, atol=2e-5
    )
    assert lacking.weight == 2 * site.windows.tokens, "padding counts nothing"
    out_XO = torch.randn(moved_BSC.flatten(0, 1).shape, generator=generator).double()
    product = (lacking.tangent.along(step_RD) * out_XO).sum()
    transposed = (lacking.tangent.sensitivity(out_XO).mT @ lacking.tangent.entering_XD * step_RD).sum()
    torch.testing.assert_close(product, transposed, rtol=1e-9, atol=1e-9)
