"""timm's MLPs as channel sites: plain ones, gated ones with both halves in one layer, gated ones with two layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.vitamin import GeGluMlp
from torch import nn

from .channel_site import ChannelSite


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """The names of an MLP's linear layers. `packed`: the first one gives both numbers that a gate multiplies; `up`: it
    gives one of them, this layer the other. `norm_between`: where its norm stands.
    """

    first: str
    last: str
    up: str = ""
    packed: bool = False
    norm_between: bool = True


_LAYERS: Mapping[type[nn.Module], _Layers] = MappingProxyType(
    {
        Mlp: _Layers(first="fc1", last="fc2"),
        GluMlp: _Layers(first="fc1", last="fc2", packed=True),
        SwiGLU: _Layers(first="fc1_g", up="fc1_x", last="fc2"),
        GeGluMlp: _Layers(first="w0", up="w1", last="w2", norm_between=False),
    }
)


def mlp_refusal(mlp: nn.Module) -> str:
    """Why the hidden channels can't be reduced, or nothing."""
    layers = _LAYERS.get(type(mlp))
    if layers is None:
        expected = ", ".join(kind.__name__ for kind in _LAYERS)
        return f"MLP is {type(mlp).__name__}, expected one of timm's {expected}"
    for name in filter(None, (layers.first, layers.up, layers.last)):
        if not isinstance(layer := mlp.get_submodule(name), nn.Linear):
            return f"{name} is {type(layer).__name__}, expected a linear layer"
    if layers.norm_between and not isinstance(norm := mlp.get_submodule("norm"), nn.Identity):
        return f"a {type(norm).__name__} between the linear layers mixes all hidden channels"
    for act in (each for name, each in mlp.named_children() if name.startswith("act")):
        if any(True for _ in act.parameters()):
            return f"activation {type(act).__name__} has parameters"
    return ""


def _linear(mlp: nn.Module, name: str) -> nn.Linear:
    layer = mlp.get_submodule(name)
    assert isinstance(layer, nn.Linear), (name, layer)
    return layer


def channel_site(name: str, mlp: nn.Module, merge: nn.Module | None = None) -> ChannelSite:
    """The site of an MLP that is not refused."""
    layers = _LAYERS[type(mlp)]
    return ChannelSite(
        name=name,
        first=_linear(mlp, layers.first),
        last=_linear(mlp, layers.last),
        up=_linear(mlp, layers.up) if layers.up else None,
        first_name=f"{name}.{layers.first}",
        last_name=f"{name}.{layers.last}",
        up_name=f"{name}.{layers.up}" if layers.up else "",
        packed=layers.packed,
        merge=merge,
    )
