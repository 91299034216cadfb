"""What every site tells, whatever its kind."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from torch import nn

from calib.sites import ChannelTaps, HeadTaps, PatchTaps

from .widths import HeadGeometry, Width

Currency = Literal["macs", "params"]


class Site(Protocol):
    """A place whose width can be reduced; `name` is that of its layer in the model."""

    kind: ClassVar[str]

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """Why a part of the site must stay as it is, or nothing."""
        ...

    @property
    def size(self) -> int:
        """The one number that a reduction changes."""
        ...

    @property
    def width(self) -> Width:
        """The widths that the site has."""
        ...

    @property
    def last(self) -> nn.Linear | nn.Conv2d:
        """The layer that gives the site's outputs."""
        ...

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All that the site's parameters are in."""
        ...

    def entering(self, tokens: int) -> tuple[int, ...]:
        """The shape, behind the batch, of so many tokens that enter the site's layer alone."""
        ...

    def size_of(self, width: Width) -> int:
        """The one number that other widths of this site stand for."""
        ...

    def listening(self) -> tuple[ChannelTaps | HeadTaps | PatchTaps, ...]:
        """Where calibration listens."""
        ...

    def describe(self) -> str:
        """The widths for people."""
        ...

    def cost_signature(self, geometry: HeadGeometry) -> str:
        """What two sites that cost the same have in common, for people."""
        ...

    def macs(self, width: Width, geometry: HeadGeometry, tokens: int) -> int:
        """Multiply-adds of one input with so many tokens at another width."""
        ...

    def parameters(self, width: Width, geometry: HeadGeometry) -> int:
        """Parameters at another width, with the output bias that the repair may need and the dense layer lacks."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Widths and biases, as config.json has them."""
        ...

    def as_metadata(self) -> dict[str, int]:
        """The widths that a graph carries."""
        ...

    def recorded(self, entry: Mapping[str, Any]) -> dict[str, nn.Module]:
        """The modules, by name and without weights yet, that make this site what `as_json` has written; none where it
        is that already.
        """
        ...

    def of_layer(self, layer: nn.Module) -> "Site":
        """The same site in a copy of its layer."""
        ...
