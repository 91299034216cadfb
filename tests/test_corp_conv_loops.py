"""Both closed loops over rows of convolutions: against hooks and explicit patches in float64.

Legend: X positions of all images, U columns of a patch, O outputs, P of a group.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corp_deploy.families.conv_block import ConvBlock, ConvRow
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.convolution import Convolution, folded
from corp_deploy.families.maps import map_from_tokens
from corp_deploy.families.modules import linear, replaced
from corp_deploy.families.squeeze import SqueezeExcite
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import ConvWidths, Width
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import Loop, reduce_closed_loop
from corp_deploy.reduction.conv_loop import fitted_row
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.streams import Streams
from corp_deploy.reduction.symmetric_loop import reduce_symmetric_loop
from tests import tiny
from tests.small_convnets import checkpoint, conv_sites, images_of, method, outputs, pairs_of, pixels

RIDGE = 1e-3


def site_of(model: nn.Module, name: str) -> ConvSite:
    return next(site for site in conv_sites(model) if site.name == name)


def heard(model: nn.Module, module: str, pictures: Tensor, *, given: bool = False) -> Tensor:
    """What enters a module, or what it gives, in a float64 copy of the model."""
    double, caught = copy.deepcopy(model).double(), list[Tensor]()
    inside = double.get_submodule(module)
    if given:
        inside.register_forward_hook(lambda _, args, out: caught.append(out))
    else:
        inside.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.inference_mode():
        double(pictures.double())
    return caught[0]


def patches_of(conv: nn.Conv2d, x: Tensor) -> list[Tensor]:
    """Patches [X,U] of each group."""
    of_groups = x.chunk(conv.groups, dim=1)
    how: dict[str, Any] = {"padding": conv.padding, "stride": conv.stride, "dilation": conv.dilation}
    return [functional.unfold(each, conv.kernel_size, **how).mT.flatten(0, 1) for each in of_groups]


def rows_of(map_BOHW: Tensor) -> Tensor:
    return map_BOHW.flatten(2).mT.flatten(0, 1)


@pytest.mark.slow("models")
def test_it_is_grails_loop() -> None:
    """Place by place: the map that the reader meets in the model so far, by a hook; structured Wanda on its patches;
    W[:, :, t] G_:S (G_SS + ridge I)^-1 for every place t of the kernel, G the Gram of all places of the map (B5).
    """
    for name in ("resnet18d", "resnet50", "resnext50_32x4d"):
        model, shown = checkpoint(name).model, pixels(24)
        few, grail = images_of(name, 24), method("grail", 0.5, ridge_rel=RIDGE)
        looped = reduce_symmetric_loop(model, few, grail)
        by_hand = copy.deepcopy(model).double()
        for site, narrow in pairs_of(by_hand, looped.model):
            for place, between in enumerate(site.between):
                reader, writer = site.convolution(between.reader), site.convolution(between.writer)
                x = heard(by_hand, f"{site.name}.{between.reader}", shown)
                width, groups = x.shape[1], site.groups(place)
                rms_U = torch.cat([each.square().mean(0).sqrt() for each in patches_of(reader, x)])
                norms = reader.weight.abs().unflatten(0, (reader.groups, -1)).sum(1)  # [G, C of a group, h, w]
                score_NC = (norms.flatten() * rms_U).view(width, -1).sum(1).view(groups, -1)
                each = narrow.width.channels[place] // groups
                order_NC = score_NC.argsort(dim=1, descending=True, stable=True)[:, :each].sort(1).values
                kept = (order_NC + torch.arange(groups)[:, None] * (width // groups)).flatten()
                new = []
                for group in range(reader.groups):
                    own = slice(group * width // reader.groups, (group + 1) * width // reader.groups)
                    inside = kept[(kept >= own.start) & (kept < own.stop)] - own.start
                    x_XC = rows_of(x[:, own])
                    gram = x_XC.T @ x_XC / len(x_XC)
                    ridge = RIDGE * gram[inside[:, None], inside].diagonal().mean()
                    shifted = gram[inside[:, None], inside] + ridge * torch.eye(len(inside))
                    map_CS = gram[:, inside] @ torch.linalg.inv(shifted)
                    rows = reader.weight.unflatten(0, (reader.groups, -1))[group]
                    new.append(torch.einsum("ochw,cs->oshw", rows, map_CS))
                reader.weight = nn.Parameter(torch.cat(new), requires_grad=False)
                writer.weight = nn.Parameter(writer.weight[kept], requires_grad=False)
                writer.bias = nn.Parameter(writer.bias[kept], requires_grad=False)  # type: ignore[index]
        expected, found = outputs(by_hand, pixels(6, seed=9).double()), outputs(looped.model, pixels(6, seed=9))
        assert float((found - expected).norm() / expected.norm()) < 2e-4, name
        assert not any(site.loop for site in looped.sites)
        alone = reduce(model, calibrate(checkpoint(name), few, batch_size=8), grail)
        apart = outputs(alone.model, pixels(6, seed=9)) - expected
        assert float(apart.norm() / expected.norm()) > 1e-2, name  # it can tell


def ridge_by_hand(u_XU: Tensor, t_XO: Tensor, prior_OU: Tensor, strength: float) -> Tensor:
    """Weights and bias [O,U+1] by lstsq: rows of patches, and rows that pull toward the prior."""
    count, width = u_XU.shape
    pull = (strength * u_XU.var(0, correction=0).mean()).sqrt()
    with_one = torch.cat([u_XU, torch.ones(count, 1, dtype=torch.float64)], dim=1) / count**0.5
    rows = torch.cat([with_one, pull * torch.eye(width, width + 1, dtype=torch.float64)])
    wanted = torch.cat([t_XO / count**0.5, pull * prior_OU.T])
    solved: Tensor = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    return solved.T


def kept_rows(narrow: Convolution, dense: Convolution) -> Tensor:
    """Which of the dense outputs are there."""
    apart = torch.cdist(narrow.weight.flatten(1).double(), dense.weight.flatten(1).double())
    assert float(apart.min(1).values.max()) < 1e-6
    return apart.argmin(1)


def held_to_lstsq(found: Convolution, u: list[Tensor], target: Tensor, prior: Tensor, strength: float) -> None:
    """Each group's weights and biases."""
    parts = zip(u, rows_of(target).chunk(found.groups, 1), prior.flatten(1).chunk(found.groups), strict=True)
    expected = torch.cat([ridge_by_hand(*part, strength) for part in parts])
    mine = torch.cat([found.weight.double().flatten(1), found.bias.double()[:, None]], dim=1)  # type: ignore[union-attr]
    assert float((mine - expected).norm() / expected.norm()) < 2e-3
    assert float((found.weight.double() - prior).norm() / prior.norm()) > 2e-2  # there was something to fit


@pytest.mark.parametrize(
    ("name", "block", "place", "target"),
    [
        ("resnet18d", "conv1", 0, "inner"),
        ("resnet18d", "layer3.0", 0, "stream"),
        ("resnet50", "layer2.0", 0, "inner"),
        ("resnet50", "layer2.0", 1, "stream"),
        ("resnext50_32x4d", "layer2.0", 0, "inner"),
        ("seresnet50", "layer2.0", 1, "squeezed"),
    ],
)
def test_what_reads_is_the_least_squares_answer(name: str, block: str, place: int, target: str, tmp_path: Path) -> None:
    """What reads one place, after the block before has lost channels, against lstsq over all patches of all images."""
    model, strength = checkpoint(name).model, 0.1
    site = site_of(model, block)
    names = [each.name for each in conv_sites(model)]
    asked: dict[str, Width] = {}
    if block != names[0]:
        before = site_of(model, names[names.index(block) - 1])
        asked[before.name] = ConvWidths(channels=tuple(each // 2 for each in before.width.channels))
    dense_channels = site.width.channels
    asked[block] = ConvWidths(channels=tuple(each // 2 if at == 0 else each for at, each in enumerate(dense_channels)))
    shown = pixels(16).repeat_interleave(4, 0)  # what is held out is what is fitted, so the fit is always taken
    source = tiny.opened(tmp_path / "images.npy", shown.numpy(), model)
    loop = Loop(strengths=(strength,), align_inputs=False)
    looped = reduce_closed_loop(model, source, method("none", 0.5), widths=asked, loop=loop)
    new, between = site_of(looped.model, block), site.between[place]
    assert [each.loop.strength for each in looped.sites if each.loop] == [strength] * len(looped.sites)
    reader, dense = new.convolution(between.reader), site.convolution(between.reader)
    path = f"{block}.{between.reader}"
    prior = dense.weight.double()
    if place == 0:
        kept = kept_rows(new.convolution(between.writer), site.convolution(between.writer))
        width = dense_channels[0] // dense.groups
        columns = [kept[(kept // width) == group] % width for group in range(dense.groups)]
        prior = torch.cat([each[:, of] for each, of in zip(prior.chunk(dense.groups), columns, strict=True)])
    if target == "stream":
        before_act = f"{block}.{site.block.act_name}"
        carried = copy.deepcopy(site.block.shortcut).double()(heard(looped.model, block, pixels(16)))
        wanted = heard(model, before_act, pixels(16)) - carried
    else:
        wanted = heard(model, path, pixels(16), given=True)
    held_to_lstsq(reader, patches_of(reader, heard(looped.model, path, pixels(16))), wanted, prior, strength)


@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d"])
def test_the_first_convolution_is_aligned_by_least_squares(name: str, tmp_path: Path) -> None:
    model, strength, block = checkpoint(name).model, 0.1, "layer2.0"
    site = site_of(model, block)
    asked: dict[str, Width] = {"layer1.0": ConvWidths(channels=(8, 8)), block: site.width}
    shown = pixels(16).repeat_interleave(4, 0)
    source = tiny.opened(tmp_path / "images.npy", shown.numpy(), model)
    looped = reduce_closed_loop(model, source, method("none", 0.5), widths=asked, loop=Loop(strengths=(strength,)))
    strengths = [each.alignment.strength for each in looped.sites if each.alignment]
    assert strengths == [None, strength]
    first = site_of(looped.model, block).first
    u = patches_of(first, heard(looped.model, f"{block}.conv1", pixels(16)))
    wanted = heard(model, f"{block}.conv1", pixels(16), given=True)
    held_to_lstsq(first, u, wanted, site.first.weight.double(), strength)


def _row_with_a_squeeze() -> ConvBlock:
    """1x1, rectified, 3x3 of each channel, squeezed, 1x1."""
    torch.manual_seed(3)
    grid = (6, 6)
    convs = nn.Conv2d(6, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 6, 1)
    for conv in convs:
        nn.init.normal_(conv.weight, std=0.5)
        assert conv.bias is not None
        nn.init.normal_(conv.bias, std=0.5)
    squeeze = SqueezeExcite(linear(16, 4), nn.ReLU(), linear(4, 16), nn.Sigmoid())
    parts = dict(zip(("pw", "dw", "pwl"), (folded(conv, None, grid) for conv in convs), strict=True))
    row = {"pw": parts["pw"], "act": nn.ReLU(), "dw": parts["dw"], "se": squeeze, "pwl": parts["pwl"]}
    return ConvBlock(row, grid, adds=True).eval().requires_grad_(False)


@torch.no_grad()
def test_behind_a_squeeze_it_is_fitted_to_what_is_read_then() -> None:
    """A squeeze of fewer channels scales what is read by other numbers; the fit knows them."""
    block, strength = _row_with_a_squeeze(), 0.1
    site = ConvSite(name="block", block=block)
    assert site.between[0].along == ("dw", "se")
    branch = Branch(name="block", norm=nn.Identity(), layer=ConvRow(block.row, block.grid), scale_C=None)
    x_BNC = torch.randn(24, 36, 6, generator=torch.Generator().manual_seed(1)).repeat_interleave(4, 0)
    streams = Streams([(x_BNC, None)])
    for pair in streams:
        pair.reduced = pair.dense + 0.3 * pair.dense.sin()
    loop = Loop(strengths=(strength,), align_inputs=False)
    width = ConvWidths(channels=(8,))
    new, _ = fitted_row(branch, site, streams, method("none", 0.5), width, loop)
    narrow = replaced(branch.layer, {name.removeprefix("block."): each for name, each in new.modules.items()})
    reduced_BNC = (x_BNC + 0.3 * x_BNC.sin()).double()
    dense, found = block.convolutions, narrow.get_submodule("pwl")
    assert isinstance(found, Convolution)
    first = narrow.get_submodule("pw")
    assert isinstance(first, Convolution)
    kept = kept_rows(first, dense["pw"])
    read: list[Tensor] = []
    double = copy.deepcopy(narrow).double()
    double.get_submodule("pwl").register_forward_pre_hook(lambda _, args: read.append(args[0]))
    double(reduced_BNC)
    behind_BNC = x_BNC.double() + copy.deepcopy(branch.layer).double()(x_BNC.double())
    wanted = map_from_tokens(behind_BNC - reduced_BNC, (6, 6))
    held_to_lstsq(found, patches_of(found, read[0]), wanted, dense["pwl"].weight.double()[:, kept], strength)
    dense_behind = torch.cat([pair.dense for pair in streams])
    assert float((dense_behind.sum() - behind_BNC.sum()).abs()) < 1e-2


def test_pieces_grow_as_maps_shrink() -> None:
    x_BNC = torch.randn(40, 1024, 3)
    streams = Streams([(x_BNC[:24], None), (x_BNC[24:], None)])
    assert {len(pair.dense) for pair in streams} == {2}
    held = torch.cat([pair.dense for pair in streams if pair.held_out])
    for pair in streams:
        pair.dense = pair.reduced = pair.dense[:, :128]
    streams.gather()
    assert {len(pair.dense) for pair in streams} == {16, 14, 10}
    assert all(pair.reduced is pair.dense for pair in streams)
    assert torch.equal(torch.cat([pair.dense for pair in streams if pair.held_out]), held[:, :128])
    next(iter(streams)).reduced = torch.zeros(16, 128, 3)
    before = [pair.reduced for pair in streams]
    streams.gather()
    assert all(one is other for one, other in zip(before, (pair.reduced for pair in streams), strict=True))
