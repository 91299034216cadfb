"""Listening at sites: forward hooks that hand activations on and are gone when the context closes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from .sites import Role, Site

Hear = Callable[[str, Role, Tensor], None]


@contextmanager
def listening(sites: Sequence[Site], on_activation: Hear) -> Iterator[None]:
    """Calls hear(site name, role, activation) during forward passes: x and z [B,N,...], q and k [B,H,N,D] or in
    windows [B,W,H,N,D]; of a convolution the maps x [B,C,H,W] and y [B,O,H,W]."""
    with ExitStack() as stack:
        for site in sites:
            for role, tap in site.taps.items():
                stack.callback(tap.listen(site.name, partial(on_activation, site.name, role)).remove)
        yield


@contextmanager
def listening_to_merges(sites: Sequence[Site], on_merge: Callable[[nn.Module, Tensor | None], None]) -> Iterator[None]:
    """Calls hear(merge, sizes [B,N] of the tokens it gives, or None) when a merge before one of the sites has run."""

    def hook(merge: nn.Module, _: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
        on_merge(merge, outputs[1])

    with ExitStack() as stack:
        for merge in {id(site.merge): site.merge for site in sites if site.merge is not None}.values():
            stack.callback(merge.register_forward_hook(hook).remove)
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
