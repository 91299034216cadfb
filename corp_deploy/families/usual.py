"""What holds for a family that says nothing else."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput

from .merging import Merging
from .modules import replaced
from .seam import TimmFamily, Told
from .timm_library import unused
from .widths import HeadGeometry


def token_weights(model: nn.Module, inputs: Inputs) -> None:
    """All count alike."""


def merging_of(model: nn.Module) -> None:
    """There is none."""


def beside(model: nn.Module) -> Mapping[str, str]:
    """Nothing stands beside the weights."""
    return {}


def take_beside_(model: nn.Module, directory: Path) -> None:
    """Nothing stands there."""


def same_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The library has nothing to adapt, its names are the model's own."""
    return dict(state)


_USUAL: Mapping[str, Any] = MappingProxyType(
    {
        "FIXED_PARTS": (),
        "token_weights": token_weights,
        "merging_of": merging_of,
        "beside": beside,
        "take_beside_": take_beside_,
        "adapted_state": same_state,
        "unused": unused,
    }
)


class _Complete:
    """A family's own functions, and the usual ones beside them."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def __getattr__(self, name: str) -> Any:
        if name == "told" or not (hasattr(self.told, name) or name in _USUAL):
            raise AttributeError(name)
        return getattr(self.told, name) if hasattr(self.told, name) else _USUAL[name]

    def merging_refusal(self, model: nn.Module) -> str:
        own: Any = getattr(self.told, "merging_refusal", None)
        return str(self.told.UNMERGEABLE if own is None else own(model))  # type: ignore[attr-defined]

    def exportable(self, model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
        """The family's own, or a copy in eval mode whose attention is spelled MatMul-Softmax-MatMul, timm's own too."""
        own: Any = getattr(self.told, "exportable", None)
        if own is not None:
            form: nn.Module = own(model, geometry=geometry)
            return form
        copied = replaced(model, self.told.sites(model).spelled_out(geometry))
        of_timm = copied.modules() if self.told.NAME.startswith("timm") else ()
        for module in of_timm:
            if type(module).__module__.startswith("timm.") and hasattr(module, "fused_attn"):
                module.fused_attn = False  # type: ignore[assignment]
        return copied.eval().requires_grad_(False)

    def with_merging(self, model: nn.Module, merging: Merging | None) -> nn.Module:
        """The family's own, or a copy in eval mode where nothing is to be merged. Raises BadInput for a merging."""
        own: Any = getattr(self.told, "with_merging", None)
        if own is None and merging is not None:
            raise BadInput(f"token merging: {self.merging_refusal(model)}; leave --merge-tokens away")
        merged: nn.Module = replaced(model, {}).eval() if own is None else own(model, merging)
        return merged


def complete(told: Told) -> TimmFamily:
    """The family with what it left out, asked anew each time. The functions for timm's weights are of use where timm
    built the model alone.
    """
    return cast(TimmFamily, _Complete(told))
