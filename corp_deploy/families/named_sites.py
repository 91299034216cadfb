"""Sites of any module, by the names of its layers: checked on a random image, since nothing else is known of the
module.

Legend: B images, N tokens, C channels, F hidden channels.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from ground.errors import BadInput
from ground.ports import Role

from .attention_site import site_of_attention
from .channel_site import ChannelSite
from .head_attention import HeadAttention
from .head_site import HeadSite
from .preprocessing import Preprocessing
from .sites import Sites

CLOSE = 1e-4
EXPECTED_MLP = 'the names of its linear layers inside it: ("fc1", "fc2"), or ("gate", "fc2", "up") of a gated one'
EXPECTED_ATTENTION = '{"qkv": NAME, "proj": NAME, "heads": N}, with "scale" where that is not 1 / sqrt(dim / heads)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Where a module's sites are. `mlps`: linear layers by the MLP's name, first, last and, where it is gated, the
    other first one. `attentions`: names of modules that are HeadAttention. `renamed`: what the user's names of
    weights start with, by what they start with here.
    """

    shape: tuple[int, int, int]
    role: Role
    mlps: Mapping[str, tuple[str, ...]]
    attentions: tuple[str, ...]
    preprocessing: Preprocessing
    renamed: Mapping[str, str] = field(default_factory=dict)


class NamedSites(nn.Module):
    """What stands before a module's own class in one whose sites are named; `plain` is its class."""

    plain: ClassVar[type[nn.Module]]
    naming: Naming


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [each for each, _ in model.named_modules() if each.count(".") == name.count(".")][:4]
        raise BadInput(f"sites: the model has no module {name!r:.150}; it has such as {', '.join(known)}") from None


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = _submodule(model, name)
    if not isinstance(layer, nn.Linear):
        raise BadInput(f"sites: {name} is {type(layer).__name__}, expected a linear layer")
    return layer


def _of_mlp(model: nn.Module, name: str, layers: tuple[str, ...]) -> ChannelSite:
    if len(layers) not in (2, 3) or not all(isinstance(layer, str) for layer in layers):
        raise BadInput(f"sites: {name}: got {layers!r:.150}, expected {EXPECTED_MLP}")
    first, last, *up = (f"{name}.{layer}" for layer in layers)
    if _linear(model, first).out_features != _linear(model, last).in_features:
        rows, width = _linear(model, first).out_features, _linear(model, last).in_features
        raise BadInput(f"sites: {name}: {first} gives {rows} channels, {last} takes {width}; they are no pair")
    return ChannelSite(
        name=name,
        first=_linear(model, first),
        last=_linear(model, last),
        up=_linear(model, up[0]) if up else None,
        first_name=first,
        last_name=last,
        up_name=up[0] if up else "",
    )


def _of_attention(model: nn.Module, name: str) -> HeadSite:
    module = model.get_submodule(name)
    assert isinstance(module, HeadAttention), (name, module)
    return site_of_attention(name, module)


def sites_by_name(model: nn.Module, naming: Naming) -> Sites:
    """The MLPs, then the attentions, dense or already reduced."""
    channels = [_of_mlp(model, name, layers) for name, layers in naming.mlps.items()]
    return Sites(every=(*channels, *(_of_attention(model, name) for name in naming.attentions)), refused=())


def _attention(model: nn.Module, name: str, said: Mapping[str, Any]) -> HeadAttention:
    """The same attention as a module whose widths can change, with the weights of the user's."""
    if not {"qkv", "proj", "heads"} <= said.keys() <= {"qkv", "proj", "heads", "scale"}:
        raise BadInput(f"sites: {name}: got {dict(said)!r:.150}, expected {EXPECTED_ATTENTION}")
    qkv, proj = (_linear(model, f"{name}.{said[part]}") for part in ("qkv", "proj"))
    heads, width = said["heads"], proj.in_features
    if type(heads) is not int or heads < 1 or width % heads or qkv.out_features != 3 * width:
        raise BadInput(
            f"sites: {name}: qkv gives {qkv.out_features} and proj takes {width} for {heads!r:.50} heads; expected "
            "queries, keys and values of as many heads of one size, one behind the other"
        )
    attention = HeadAttention(
        dim=qkv.in_features,
        heads=heads,
        qk=width // heads,
        v=width // heads,
        scale=float(said.get("scale", (width // heads) ** -0.5)),
        geometry="square",
        qkv_bias=qkv.bias is not None,
        proj_bias=proj.bias is not None,
    )
    attention.qkv, attention.proj = copy.deepcopy(qkv), copy.deepcopy(proj)
    return attention


@torch.no_grad()
def _ran(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    out = model(images)
    if not isinstance(out, Tensor):
        raise BadInput(f"sites: the model gives a {type(out).__name__}, expected one tensor of images")
    return out


def _heard(model: nn.Module, shape: tuple[int, ...], name: str, hear: Callable[[Any, Any, Any], Any]) -> None:
    """Run the model with a hook on one module, which must be called once."""
    calls = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], how: dict[str, Any], out: Any) -> Any:
        calls.append(name)
        return hear(inputs, how, out)

    handle = model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    try:
        _ran(model, shape)
    finally:
        handle.remove()
    if len(calls) != 1:
        raise BadInput(f"sites: {name} is called {len(calls)} times for an image, expected once")


def _refuse_other_attention(model: nn.Module, shape: tuple[int, ...], name: str, attention: HeadAttention) -> None:
    def hear(inputs: tuple[Any, ...], how: dict[str, Any], out: Any) -> None:
        alone = len(inputs) == 1 and not how and isinstance(out, Tensor)
        if not alone or not isinstance(inputs[0], Tensor) or inputs[0].ndim != 3:
            raise BadInput(
                f"sites: {name} takes or gives more than one [batch, tokens, channels]; it can't be replaced"
            )
        error = float((attention(inputs[0]) - out).norm() / out.norm().clamp_min(1e-30))
        if not error < CLOSE:
            raise BadInput(
                f"sites: {name} is not the softmax attention of {attention.heads} heads that its layers say (relative "
                f"difference {error:.2g}); leave it out, or say another scale"
            )

    _heard(model, shape, name, hear)


def _refuse_mixed_channels(model: nn.Module, shape: tuple[int, ...], site: ChannelSite) -> None:
    """Half of the hidden channels are set to zero behind the first layer; before the last one the others must stay."""
    before: list[Tensor] = []

    def entering(inputs: tuple[Any, ...], _: Any, __: Any) -> None:
        before.append(inputs[0].detach().clone())

    def zeroed(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        kept_F = torch.arange(out.shape[-1], device=out.device) % 2 == 0
        return out * kept_F

    _heard(model, shape, site.last_name, entering)
    handles = [layer.register_forward_hook(zeroed) for layer in site.firsts]
    try:
        _heard(model, shape, site.last_name, entering)
    finally:
        for handle in handles:
            handle.remove()
    whole, half = before
    if whole.shape[-1] != site.width or not torch.allclose(half[..., ::2], whole[..., ::2], rtol=1e-4, atol=1e-6):
        raise BadInput(
            f"sites: {site.name}: between {site.first_name} and {site.last_name} channels are mixed, so that one that "
            "is left out changes others; leave it out"
        )
    if torch.equal(half[..., 1::2], whole[..., 1::2]):
        raise BadInput(f"sites: {site.name}: what {site.first_name} gives never comes to {site.last_name}")


def with_naming(model: nn.Module, naming: Naming) -> nn.Module:
    """A copy of the module that says where its sites are; its own class stays behind."""
    plain = model.plain if isinstance(model, NamedSites) else type(model)
    kind: type[NamedSites] = type(plain.__name__, (NamedSites, plain), {"plain": plain})
    copied = kind.__new__(kind)
    copied.__dict__ |= copy.deepcopy({key: value for key, value in vars(model).items() if key != "naming"})
    copied.naming = naming
    return copied


def named_sites(
    model: nn.Module,
    *,
    inputs: tuple[int, int, int],
    mlps: Mapping[str, tuple[str, ...]],
    attentions: Mapping[str, Mapping[str, Any]],
    role: Role,
    preprocessing: Preprocessing,
) -> nn.Module:
    """See corp_deploy.sites. Raises BadInput for names that are none and layers that aren't what they are said to
    be.
    """
    if common := mlps.keys() & attentions.keys():
        raise BadInput(
            f"sites: {', '.join(sorted(common))} can't be an MLP and an attention; name the modules inside it"
        )
    if not mlps and not attentions:
        raise BadInput("sites: none named; give mlps or attentions")
    with torch.device("cpu"), torch.inference_mode(False), evaluating(model):
        heads = {name: _attention(model, name, said) for name, said in attentions.items()}
        for name, attention in heads.items():
            _refuse_other_attention(model, inputs, name, attention.eval())
        for name, layers in mlps.items():
            _refuse_mixed_channels(model, inputs, _of_mlp(model, name, layers))
        renamed = {
            f"{name}.{said[part]}.": f"{name}.{part}." for name, said in attentions.items() for part in ("qkv", "proj")
        }
        memo: dict[int, Any] = {id(model.get_submodule(name)): attention for name, attention in heads.items()}
        naming = Naming(
            shape=inputs,
            role=role,
            mlps={name: tuple(layers) for name, layers in mlps.items()},
            attentions=tuple(attentions),
            preprocessing=preprocessing,
            renamed=renamed,
        )
        return with_naming(copy.deepcopy(model, memo), naming).eval()
