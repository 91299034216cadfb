"""What timm's convolutional networks are made of, as parts of ours: norms folded, activations beside their input.

Legend: B images, C channels, H and W of a map.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import BatchNormAct2d, Conv2dSame, GroupNormAct, LayerScale2d, StdConv2d
from timm.layers.conv_bn_act import ConvNormAct
from timm.layers.padding import get_same_padding
from timm.layers.squeeze_excite import SEModule
from timm.layers.std_conv import StdConv2dSame
from timm.models._efficientnet_blocks import SqueezeExcite as EfficientNetSqueeze
from torch import Tensor, nn

from corp_deploy.traced.programs.twins import without_memory

from .channel_norm import channel_norm
from .convolution import Convolution, Edges, folded
from .maps import Grid
from .modules import linear
from .squeeze import SqueezeExcite

Parts = dict[str, nn.Module]


class Unknown(Exception):
    """A layer that has no part of ours; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maps:
    """The grids of the maps that enter and leave each convolution of a model, and enter each module, by their names."""

    before: dict[str, Grid]
    behind: dict[str, Grid]


def _grid(x: Tensor) -> Grid:
    return x.shape[-2], x.shape[-1]


def maps_of(model: nn.Module, channels: int, size: Grid) -> Maps:
    """At images of this size; the model is run once without memory."""
    empty = without_memory(model).eval()
    before: dict[str, Grid] = {}
    behind: dict[str, Grid] = {}

    def listen(name: str, module: nn.Module) -> None:
        def hear(_: nn.Module, inputs: tuple[Tensor, ...], out: Any) -> None:
            if isinstance(out, Tensor) and inputs[0].ndim == 4 and out.ndim == 4:
                before[name], behind[name] = _grid(inputs[0]), _grid(out)

        module.register_forward_hook(hear)

    for name, module in empty.named_modules():
        listen(name, module)
    with torch.inference_mode(False), torch.no_grad():
        empty(torch.empty(1, channels, *size, device="meta", dtype=next(empty.parameters()).dtype))
    return Maps(before=before, behind=behind)


def _edges(conv: nn.Conv2d, before: Grid) -> Edges | None:
    """Of TensorFlow's padding, which depends on the map; None where a convolution pads as it says."""
    if not isinstance(conv, Conv2dSame) and not (isinstance(conv, StdConv2dSame) and conv.same_pad):
        return None
    sizes = zip(before, conv.kernel_size, conv.stride, conv.dilation, strict=True)
    height, width = (get_same_padding(n, k, stride, spread) for n, k, stride, spread in sizes)
    return width // 2, width - width // 2, height // 2, height - height // 2


def _plain(name: str, conv: nn.Module) -> nn.Conv2d:
    """A convolution padded with zeros whose weights are those that it runs with. Raises Unknown for other layers."""
    kinds = (nn.Conv2d, Conv2dSame, StdConv2d, StdConv2dSame)
    if type(conv) not in kinds or not isinstance(conv, nn.Conv2d) or conv.padding_mode != "zeros":
        raise Unknown(f"{name} is {type(conv).__name__}, expected a plain convolution")
    return _standardised(conv) if isinstance(conv, StdConv2d | StdConv2dSame) else conv


@torch.no_grad()
def _standardised(conv: StdConv2d | StdConv2dSame) -> nn.Conv2d:
    """A copy with the weights that it runs with, those of each output less their mean and by their deviation: (w -
    mean) / sqrt(var + eps), arXiv 1903.10520.
    """
    copied = copy.deepcopy(conv)
    weight_OX = conv.weight.double().flatten(1)
    variance_O1, mean_O1 = torch.var_mean(weight_OX, dim=1, correction=0, keepdim=True)
    copied.weight.copy_(((weight_OX - mean_O1) * (variance_O1 + conv.eps).rsqrt()).view_as(conv.weight))
    return copied


def plain_act(module: nn.Module) -> nn.Module:
    """A copy that leaves its input as it is."""
    copied = copy.deepcopy(module)
    if "inplace" in vars(copied):
        copied.inplace = False  # type: ignore[assignment]
    return copied


def _norm(module: nn.Module) -> tuple[nn.BatchNorm2d | None, nn.Module]:
    """The norm to be folded and the activation that is of the same module."""
    if type(module) is nn.BatchNorm2d:
        return module, nn.Identity()
    if type(module) is BatchNormAct2d:
        return module, plain_act(module.act)
    if isinstance(module, nn.Identity):
        return None, nn.Identity()
    raise Unknown(f"its norm is {type(module).__name__}, which no convolution can take in; expected BatchNorm2d")


class Folding:
    """Collects the parts of one row, a convolution with what stands behind it at a time; `name` is the block's."""

    def __init__(self, name: str, maps: Maps) -> None:
        self.name, self.maps, self.parts = name, maps, Parts()

    def _path(self, name: str) -> str:
        return f"{self.name}.{name}".strip(".")

    def convolution(self, name: str, conv: nn.Module, norm: nn.Module | None) -> tuple[Convolution, nn.Module]:
        """With the norm in its weights, and the norm's own activation. Raises Unknown for other layers."""
        plain = _plain(name, conv)
        own, act = (None, nn.Identity()) if norm is None else _norm(norm)
        before, behind = self.maps.before[self._path(name)], self.maps.behind[self._path(name)]
        return folded(plain, own, behind, _edges(plain, before)), act

    def add(self, name: str, conv: nn.Module, norm: nn.Module | None, act: tuple[str, nn.Module] | None = None) -> None:
        """A convolution under the last of its names, its norm's activation, or another by name."""
        short = name.partition(".")[0] if name.endswith(".conv") else name
        self.parts[short.replace(".", "_")], own = self.convolution(name, conv, norm)
        if not isinstance(own, nn.Identity):
            self.parts[f"{short}_act"] = own
        if act is not None and not isinstance(act[1], nn.Identity):
            self.parts[act[0]] = plain_act(act[1])

    def add_normed(self, name: str, conv: nn.Module, norm_name: str, norm: nn.Module) -> None:
        """A convolution and what can't be taken into its weights, a norm over groups of its channels."""
        if type(norm) is not GroupNormAct or norm.weight is None:
            raise Unknown(f"{norm_name} is {type(norm).__name__}, expected timm's GroupNormAct")
        self.parts[name], _ = self.convolution(name, conv, None)
        self.parts[norm_name] = channel_norm(norm)
        if not isinstance(norm.act, nn.Identity):
            self.parts[f"{norm_name}_act"] = plain_act(norm.act)

    def add_conv_norm_act(self, name: str, module: nn.Module) -> None:
        """timm's three in one, and a pool behind them."""
        if type(module) is not ConvNormAct:
            raise Unknown(f"{name} is {type(module).__name__}, expected timm's ConvNormAct")
        self.add(f"{name}.conv", module.conv, module.bn)
        self.add_between(f"{name}_aa", module.aa)

    @torch.no_grad()
    def scale(self, gain_O: Tensor) -> None:
        """LayerScale's gains in the weights of the last convolution."""
        last = [part for part in self.parts.values() if isinstance(part, Convolution)][-1]
        assert last.bias is not None, last
        gain_O = gain_O.double()
        last.fill_(last.weight.double() * gain_O.view(-1, 1, 1, 1), last.bias.double() * gain_O)

    def add_any(self, name: str, module: nn.Module) -> None:
        """A convolution with its norm, gains, or what stands between convolutions."""
        if isinstance(module, ConvNormAct):
            self.add_conv_norm_act(name, module)
        elif isinstance(module, LayerScale2d):
            self.scale(module.gamma)
        else:
            self.add_between(name, module)

    def add_between(self, name: str, module: nn.Module | None) -> None:
        """What has no weights and works channel by channel, or a squeeze; nothing for an identity."""
        if module is None or isinstance(module, nn.Identity):
            return
        if isinstance(module, SEModule | EfficientNetSqueeze):
            self.parts[name] = squeeze_of(module)
        elif [*module.parameters(), *module.buffers()]:
            raise Unknown(f"{name} is {type(module).__name__}, whose weights are by channel")
        else:
            self.parts[name] = plain_act(module)


def _pointwise(conv: nn.Module) -> nn.Linear:
    assert isinstance(conv, nn.Conv2d), conv
    where = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    layer = linear(conv.in_channels, conv.out_channels, bias=True, **where)
    with torch.no_grad():
        layer.weight.copy_(conv.weight[:, :, 0, 0])
        assert layer.bias is not None
        layer.bias.zero_()
        if conv.bias is not None:
            layer.bias.copy_(conv.bias)
    return layer.requires_grad_(conv.weight.requires_grad)


def squeeze_of(module: SEModule | EfficientNetSqueeze) -> SqueezeExcite:
    """Raises Unknown for one of more than means, two layers and a gate."""
    if isinstance(module, SEModule):
        if module.add_maxpool or not isinstance(module.bn, nn.Identity):
            raise Unknown("its squeeze takes maxima, or has a norm")
        first, act, second = module.fc1, module.act, module.fc2
    else:
        first, act, second = module.conv_reduce, module.act1, module.conv_expand
    return SqueezeExcite(_pointwise(first), plain_act(act), _pointwise(second), plain_act(module.gate))


def shortcut_of(name: str, module: nn.Module, maps: Maps) -> nn.Module:
    """A shortcut of pools and convolutions with their norms folded. Raises Unknown for other layers."""
    folding = Folding(name, maps)
    if isinstance(module, nn.Identity):
        return module
    if type(module) is ConvNormAct:
        return folding.convolution("conv", module.conv, module.bn)[0]
    layers = list(_flat("", module))
    parts = Parts()
    for place, (path, layer) in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            behind = layers[place + 1][1] if place + 1 < len(layers) else None
            parts[path.replace(".", "_")], _ = folding.convolution(path, layer, behind)
        elif isinstance(layer, nn.AvgPool2d | nn.MaxPool2d):
            parts[path] = layer
        elif not isinstance(layer, nn.BatchNorm2d | nn.Identity):
            raise Unknown(f"its shortcut has {type(layer).__name__}")
    return nn.Sequential(OrderedDict(parts))


def _flat(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested sequences in the order they run; a convolution of timm's with its norm behind it."""
    if type(module) is ConvNormAct:
        yield f"{name}.conv".strip("."), module.conv
        yield f"{name}.bn".strip("."), module.bn
    elif isinstance(module, nn.Sequential):
        for own, child in module.named_children():
            yield from _flat(f"{name}.{own}".strip("."), child)
    else:
        yield name, module
