"""Sites where statistics are collected, and contexts that hook their modules.

Shapes, with the batch in front: B inputs, W windows, H heads, N tokens, D dims, F and C channels; of convolutions C
input and O output channels, H rows, W columns, G groups, R channels of a group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ground.errors import BadInput

Role = Literal["x", "q", "k", "z", "y"]
SiteKind = Literal["mlp", "attention", "convolution"]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _heads(site: str, x: Tensor) -> Tensor:
    if x.ndim not in (4, 5):
        raise BadInput(
            f"{site}: got q or k of shape {list(x.shape)}, expected [batch, heads, tokens, dims] or [batch, windows, "
            "heads, tokens, dims]"
        )
    return x


def _tokens_into(module: nn.Module, site: str, x: Tensor) -> Tensor:
    """Return a linear layer's input as [B,N,F]: all axes between batch and channels are tokens."""
    if isinstance(module, CONVOLUTIONS) or (x.ndim > 3 and not isinstance(module, nn.Linear)):
        raise BadInput(
            f"{site}: {type(module).__name__} takes {list(x.shape)}, a feature map [batch, channels, ...]; only "
            "tokens [batch, tokens, channels] and vectors [batch, channels] are supported: leave this site out"
        )
    if x.ndim < 2:
        raise BadInput(
            f"{site}: got an input of shape {list(x.shape)}, expected [batch, tokens, channels] or [batch, channels]"
        )
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def _map_of(channels: int, site: str, x: Tensor) -> Tensor:
    if x.ndim != 4 or x.shape[1] != channels or not x.shape[-1]:
        raise BadInput(f"{site}: got {list(x.shape)}, expected a map [batch, {channels} channels, rows, columns]")
    return x


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tap:
    """A module's output, or its input (`of_input`), turned into an activation by `take`, then checked by `checked`."""

    module: nn.Module
    take: Callable[[Tensor], Tensor] = lambda x: x
    checked: Callable[[str, Tensor], Tensor] = _heads
    of_input: bool = False

    def listen(self, site: str, callback: Callable[[Tensor], None]) -> RemovableHandle:
        def on_tensor(x: Tensor) -> None:
            callback(self.checked(site, self.take(x)))

        if self.of_input:
            return self.module.register_forward_pre_hook(lambda _, inputs: on_tensor(inputs[0]))
        return self.module.register_forward_hook(lambda _, inputs, output: on_tensor(output))


def _entering(module: nn.Module) -> Tap:
    return Tap(module=module, checked=partial(_tokens_into, module), of_input=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelTaps:
    """The site of an MLP: x [B,N,F] is the input of `output`, its last linear layer. `merge`: see HeadTaps."""

    kind: ClassVar[SiteKind] = "mlp"
    by_token: ClassVar[bool] = True
    name: str
    output: nn.Linear
    merge: nn.Module | None = None

    @property
    def summed_width(self) -> int:
        return self.output.in_features

    @property
    def taps(self) -> Mapping[Role, Tap]:
        return {"x": _entering(self.output)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadTaps:
    """The site of an attention: q and k as they enter the dot product, before its scale; z [B,N,C] enters `output`.

    `merge`: the module whose second output [B,N] counts the tokens merged into each one, if any. `slots_WN`: 1 for
    present tokens of windows [B,W,H,N,D]; None where all are present. `causal`: a query sees keys up to its place.
    `plane_scale`: the factor before softmax if rotary embeddings rotate q and k in planes (dimensions p and p + D/2),
    else None. Shared keys are repeated for each head.
    """

    kind: ClassVar[SiteKind] = "attention"
    by_token: ClassVar[bool] = True
    name: str
    queries: Tap
    keys: Tap
    output: nn.Module
    merge: nn.Module | None = None
    slots_WN: Tensor | None = None
    causal: bool = False
    plane_scale: float | None = None

    @property
    def summed_width(self) -> int:
        return 0

    @property
    def taps(self) -> Mapping[Role, Tap]:
        return {"q": self.queries, "k": self.keys, "z": _entering(self.output)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchTaps:
    """The site of a convolution: x is the map [B,C,H,W] that enters `output`, y [B,O,H',W'] the map that leaves it.

    `channels_GR`: the channels of each group that patches have, int64, sorted; None for all.
    """

    kind: ClassVar[SiteKind] = "convolution"
    by_token: ClassVar[bool] = False
    merge: ClassVar[nn.Module | None] = None
    name: str
    output: nn.Conv2d
    channels_GR: Tensor | None = None

    def __post_init__(self) -> None:
        if self.output.padding_mode != "zeros":
            mode = self.output.padding_mode
            raise BadInput(f"{self.name}: pads by {mode!r}; only zero padding is supported: leave this site out")
        if self.channels_GR is None:
            return
        channels_GR, groups, width = self.channels_GR, self.output.groups, self.group_width
        shape = list(channels_GR.shape)
        is_valid = channels_GR.dtype == torch.int64 and len(shape) == 2 and shape[0] == groups and shape[1] > 0
        inside_GR = (channels_GR >= 0) & (channels_GR < width)
        if not is_valid or not bool(inside_GR.all() & (channels_GR.diff(dim=1) > 0).all()):
            raise BadInput(
                f"{self.name}: channels of patches are {channels_GR.dtype} {shape}, expected int64 [{groups}, any], "
                f"sorted, below each group's {width}"
            )

    @property
    def group_width(self) -> int:
        return self.output.in_channels // self.output.groups

    @property
    def chosen(self) -> int:
        return self.group_width if self.channels_GR is None else self.channels_GR.shape[1]

    @property
    def places(self) -> int:
        rows, columns = self.output.kernel_size
        return rows * columns

    @property
    def summed_width(self) -> int:
        return self.chosen * self.places

    @property
    def sizes(self) -> dict[str, int]:
        conv, width, chosen, places = self.output, self.group_width, self.chosen, self.places
        sizes = {"G": conv.groups, "C": width, "R": chosen, "T": places, "U": chosen * places}
        return sizes | {"O": conv.out_channels, "P": conv.out_channels // conv.groups}

    @property
    def taps(self) -> Mapping[Role, Tap]:
        conv = self.output
        entering = Tap(module=conv, checked=partial(_map_of, conv.in_channels), of_input=True)
        return {"x": entering, "y": Tap(module=conv, checked=partial(_map_of, conv.out_channels))}


Site = ChannelTaps | HeadTaps | PatchTaps
OnActivation = Callable[[str, Role, Tensor], None]


@contextmanager
def listening_to_sites(sites: Sequence[Site], on_activation: OnActivation) -> Iterator[None]:
    """Call `on_activation` with x and z [B,N,...], q and k [B,H,N,D] or [B,W,H,N,D], and maps x and y [B,C,H,W]."""
    with ExitStack() as stack:
        for site in sites:
            for role, tap in site.taps.items():
                stack.callback(tap.listen(site.name, partial(on_activation, site.name, role)).remove)
        yield


@contextmanager
def listening_to_merges(sites: Sequence[Site], on_merge: Callable[[nn.Module, Tensor | None], None]) -> Iterator[None]:
    """Call `on_merge` with the sizes [B,N] of merged tokens, or None, whenever a site's merge module has run."""

    def hook(merge: nn.Module, _: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
        on_merge(merge, outputs[1])

    with ExitStack() as stack:
        for merge in {id(site.merge): site.merge for site in sites if site.merge is not None}.values():
            stack.callback(merge.register_forward_hook(hook).remove)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
