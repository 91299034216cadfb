"""What holds for a family that says nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput

from . import timm_library
from .merging import Merging
from .modules import replaced
from .seam import TimmFamily, Told
from .widths import HeadGeometry


class _Usual:
    """Functions of `seam.Family` and `seam.TimmFamily`; merging is refused for the family's own reason."""

    FIXED_PARTS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, own: "_Complete") -> None:
        self.own = own

    def token_weights(self, model: nn.Module, inputs: Inputs) -> None:
        return None

    def with_merging(self, model: nn.Module, merging: Merging | None) -> nn.Module:
        if merging is not None:
            raise BadInput(f"token merging: {self.own.merging_refusal(model)}; leave --merge-tokens away")
        return replaced(model, {}).eval()

    def merging_of(self, model: nn.Module) -> None:
        return None

    def merging_refusal(self, model: nn.Module) -> str:
        return str(self.own.UNMERGEABLE)

    def exportable(self, model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
        return replaced(model, {}).eval().requires_grad_(False)

    def beside(self, model: nn.Module) -> Mapping[str, str]:
        return {}

    def take_beside_(self, model: nn.Module, directory: Path) -> None:
        return None

    def adapted_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)

    def own_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)

    def unused(self, model: nn.Module) -> tuple[str, ...]:
        return timm_library.unused(model)


class _Complete:
    """A family's own functions, and the usual ones beside them."""

    def __init__(self, told: Told) -> None:
        self.told, self.usual = told, _Usual(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.told if hasattr(self.told, name) else self.usual, name)


def complete(told: Told) -> TimmFamily:
    """The family with what it left out, asked anew each time. The functions for timm's weights are of use where timm
    built the model alone.
    """
    return cast(TimmFamily, _Complete(told))
