"""A small network of convolutions, and what its sites' statistics are by loops over images and places in float64."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from calib.collect import Options, collect
from calib.moments import Moments
from calib.patch_moments import PatchMoments
from calib.sites import PatchTaps

EPS = 1e-3
Pair = tuple[Tensor, Tensor]


class TinyMaps(nn.Module):
    """A strided convolution, a depthwise, a pointwise, a dilated one of groups and one with zeros put before it."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.grouped = nn.Conv2d(12, 12, (3, 2), 1, (2, 0), dilation=(2, 1), groups=2)
        self.around = nn.Conv2d(12, 6, 2, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.strided(images))
        x = functional.relu(self.pointwise(self.depthwise(x)), inplace=True)
        out: Tensor = self.around(functional.pad(functional.relu(self.grouped(x)), (0, 1, 0, 1)))
        return out


CHANNELS_GR = torch.tensor([[0, 3, 4], [1, 2, 5]])


def tiny_maps(*, whole_numbers: bool = False) -> TinyMaps:
    """`whole_numbers`: weights of -1, 0 and 1, few of them not zero, so that float32 is exact."""
    torch.manual_seed(0)
    model = TinyMaps()
    with torch.no_grad():
        for parameter in model.parameters() if whole_numbers else ():
            parameter.copy_(torch.where(torch.rand_like(parameter) < 0.3, parameter.sign(), 0.0))
    return model


def taps_of(model: TinyMaps) -> list[PatchTaps]:
    """All convolutions, and that of groups once more with some channels alone."""
    sites = [PatchTaps(name=name, output=getattr(model, name)) for name in ("strided", "depthwise", "pointwise")]
    sites.append(PatchTaps(name="grouped", output=model.grouped))
    sites.append(PatchTaps(name="some", output=model.grouped, channels_GR=CHANNELS_GR))
    sites.append(PatchTaps(name="around", output=model.around))
    return sites


def images_of(count: int, seed: int = 1, *, whole_numbers: bool = False) -> Tensor:
    """[count,3,11,13]."""
    generator = torch.Generator().manual_seed(seed)
    if whole_numbers:
        return torch.randint(-2, 3, (count, 3, 11, 13), generator=generator).float()
    return torch.randn(count, 3, 11, 13, generator=generator) + 0.5


def collected(images: Tensor, batch: int, *, whole_numbers: bool = False, **options: Any) -> Moments:
    model = tiny_maps(whole_numbers=whole_numbers)
    return collect(model, taps_of(model), torch.split(images, batch), device="cpu", options=Options(eps=EPS, **options))


def maps_at(model: TinyMaps, images: Tensor) -> dict[str, Pair]:
    """What enters each convolution and what it gives."""
    heard: dict[str, Pair] = {}
    hooks = []
    for site in taps_of(model):

        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor, name: str = site.name) -> None:
            heard[name] = inputs[0].clone(), output.clone()

        hooks.append(site.output.register_forward_hook(hook))
    with torch.no_grad():
        model.eval()(images)
    for each in hooks:
        each.remove()
    return heard


def sums_by_loops(site: PatchTaps, pair: Pair) -> dict[str, np.ndarray]:
    """Every sum of one site over images, places and groups, from float32 maps, in float64."""
    conv, (x, y) = site.output, (each.double().numpy() for each in pair)
    down, along = (int(side) for side in conv.padding)
    groups, width = conv.groups, x.shape[1] // conv.groups
    padded = np.pad(x, ((0, 0), (0, 0), (down, down), (along, along)))
    u, t, cross = [], [], []
    for image in range(len(x)):
        for row in range(y.shape[2]):
            for column in range(y.shape[3]):
                rows = row * conv.stride[0] + np.arange(conv.kernel_size[0]) * conv.dilation[0]
                columns = column * conv.stride[1] + np.arange(conv.kernel_size[1]) * conv.dilation[1]
                block = padded[image][:, rows][:, :, columns].reshape(groups, width, -1)
                chosen = [range(width)] * groups if site.channels_GR is None else site.channels_GR.tolist()
                u.append([block[group, list(channels)].ravel() for group, channels in enumerate(chosen)])
                t.append(y[image, :, row, column])
                cross.append([np.outer(p, v) for p, v in zip(t[-1].reshape(groups, -1), u[-1], strict=True)])
    u_nGU, y_nO = np.array(u), np.array(t)
    x_nGC = x.reshape(len(x), groups, width, -1).transpose(0, 3, 1, 2).reshape(-1, groups, width)
    sums = {
        "sum_GU": u_nGU.sum(0), "gram_GUU": np.einsum("ngu,ngv->guv", u_nGU, u_nGU), "map_sum_GC": x_nGC.sum(0),
        "map_gram_GCC": np.einsum("ngc,ngd->gcd", x_nGC, x_nGC), "active_GC": (np.abs(x_nGC) > EPS).sum(0),
        "target_sum_O": y_nO.sum(0), "target_square_O": (y_nO**2).sum(0),
    }  # fmt: skip
    return sums if site.channels_GR is None else sums | {"cross_GPU": np.sum(cross, 0)}


def patch_moments(moments: Moments, name: str) -> PatchMoments:
    site = moments.sites[name]
    assert isinstance(site, PatchMoments)
    return site


def relative(got: Tensor, expected: Tensor | np.ndarray) -> float:
    return float((got - torch.as_tensor(expected)).norm() / torch.as_tensor(expected).double().norm())
