"""Listening at sites: forward hooks that hand activations on and are gone when the context closes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import Tensor, nn

from ground.errors import BadInput

from .sites import ChannelTaps, Site, Tap

Role = Literal["x", "q", "k", "z"]
Hear = Callable[[str, Role, Tensor], None]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _tokens_from(name: str, x: Tensor, module: nn.Module) -> Tensor:
    """[B,F], [B,N,F], or [B,...,F] into a linear layer -> [B,N,F]: what lies between batch and channels is tokens."""
    if isinstance(module, CONVOLUTIONS) or (x.ndim > 3 and not isinstance(module, nn.Linear)):
        raise BadInput(
            f"{name}: {type(module).__name__} takes {list(x.shape)}, a feature map [batch, channels, ...]; there are "
            "statistics of tokens [batch, tokens, channels] and of vectors [batch, channels] alone: leave this site out"
        )
    if x.ndim < 2:
        raise BadInput(
            f"{name}: got an input of shape {list(x.shape)}, expected [batch, tokens, channels] or [batch, channels]"
        )
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def _on_input(stack: ExitStack, name: str, role: Role, module: nn.Module, hear: Hear) -> None:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hear(name, role, _tokens_from(name, inputs[0], module))

    stack.callback(module.register_forward_pre_hook(hook).remove)


def _on_output(stack: ExitStack, name: str, role: Role, tap: Tap, hear: Hear) -> None:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x_BHND = tap.take(output)
        if x_BHND.ndim != 4:
            raise BadInput(f"{name}: its tap gave {list(x_BHND.shape)}, expected [batch, heads, tokens, dims]")
        hear(name, role, x_BHND)

    stack.callback(tap.module.register_forward_hook(hook).remove)


@contextmanager
def listening(sites: Sequence[Site], hear: Hear) -> Iterator[None]:
    """Calls hear(site name, role, activation) during forward passes: x and z [B,N,...], q and k [B,H,N,D]."""
    with ExitStack() as stack:
        for site in sites:
            if isinstance(site, ChannelTaps):
                _on_input(stack, site.name, "x", site.output, hear)
                continue
            _on_output(stack, site.name, "q", site.queries, hear)
            _on_output(stack, site.name, "k", site.keys, hear)
            _on_input(stack, site.name, "z", site.output, hear)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and every submodule's own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def roles(site: Site) -> tuple[Role, ...]:
    """What one forward pass must bring for a site, each exactly once."""
    return ("x",) if isinstance(site, ChannelTaps) else ("q", "k", "z")
