"""Whether a narrowed program is the dense one with what is removed zeroed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from corp_deploy.traced.finding.compaction import kept
from corp_deploy.traced.finding.labels import placed
from corp_deploy.traced.finding.sites import Found
from corp_deploy.traced.programs.tracing import Inputs

Mask = tuple[fx.Node, tuple[int, ...], Tensor]
"""Of what a node gives, the axes that elements are removed along, and which stay."""


def masks(analysis: Found, gone: Tensor) -> dict[fx.Node, list[Mask]]:
    """Of what each node sums over, where something is removed [labels] of it."""
    sources, of_nodes = {node.name: node for node in analysis.program.nodes}, dict[fx.Node, list[Mask]]()
    for use in analysis.flow.every_use:
        keep = kept(analysis.flow.groups.of(use.labels), gone)
        if not use.is_of_constant and not bool(keep.all()):
            of_nodes.setdefault(use.node, []).append((sources[use.name], use.axes, keep))
    return of_nodes


class Masked(fx.Interpreter):
    """The dense program; what is removed is 0 wherever it would be summed over."""

    def __init__(self, analysis: Found, gone: Tensor) -> None:
        super().__init__(analysis.program.graph)
        self._masks = masks(analysis, gone)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What enters a node."""
        before = {source: self.env[source] for source, _, _ in self._masks.get(n, ())}
        for source, axes, keep in self._masks.get(n, ()):
            self.env[source] = zeroed(self.env[source], axes, keep)
        entering = super().fetch_args_kwargs_from_env(n)
        self.env |= before
        return entering


def zeroed(tensor: Tensor, axes: tuple[int, ...], keep: Tensor) -> Tensor:
    """0 where a mask [the sizes of axes] says so; an axis that counts the batch too has the mask as often."""
    mask = placed(keep, axes, tensor.dim())
    times = [have // size if size > 1 else 1 for have, size in zip(tensor.shape, mask.shape, strict=True)]
    return tensor * mask.repeat(times).to(tensor)


def difference(analysis: Found, gone: Tensor, narrowed: nn.Module, inputs: Inputs) -> float:
    """The largest of any output between a narrowed program and the dense one with the same elements zeroed, relative
    to the largest value of that output; infinite where the narrowed one doesn't run.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    with torch.no_grad():
        dense = tree_leaves(Masked(analysis, gone).run(*args, *kwargs.values()))
        try:
            new = tree_leaves(narrowed(*args, **kwargs))
        except (IndexError, RuntimeError):
            return float("inf")
    pairs = zip(dense, new, strict=True)
    return max((_apart(one, other) for one, other in pairs if isinstance(one, Tensor)), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    apart = (one.double() - other.double()).abs().amax() / one.double().abs().amax().clamp(min=1e-12)
    return float(apart) if bool(apart.isfinite()) else float("inf")
