"""What can't be asked of a model that has no attention."""

from collections.abc import Mapping

from torch import nn

from ground.errors import BadInput

from .family import sites_of
from .head_site import HeadSite


def has_attention(model: nn.Module) -> bool:
    """Whether there are heads in it, reducible or not."""
    return HeadSite.kind in sites_of(model).kinds


def refuse_attention_options(model: nn.Module, options: Mapping[str, object]) -> None:
    """Raise BadInput for an option, by its name and with what was given, that only attention honours, where there is
    none; None and False were not given.
    """
    if has_attention(model):
        return
    for name, value in options.items():
        if value is not None and value is not False:
            shown = name if value is True else f"{name} {value}"
            raise BadInput(
                f"{shown} is not honoured by a model without attention ({type(model).__name__}); leave it away"
            )
