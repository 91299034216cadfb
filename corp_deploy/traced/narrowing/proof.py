"""A program narrowed to the kept groups of its sites, and a comparison with the dense one, removed elements zeroed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from corp_deploy.traced.finding.choice import Kept, jointly_narrowed, removed_labels
from corp_deploy.traced.finding.labels import LabelTensor, compact, keep_mask, place_along
from corp_deploy.traced.finding.sites import FoundSites
from corp_deploy.traced.programs.program import set_tensor_
from corp_deploy.traced.programs.steady import require_steady
from corp_deploy.traced.programs.threads import one_thread

from .rewriter import NarrowingRefused, Parts, kept_part, remove_elements

Mask = tuple[fx.Node, tuple[int, ...], Tensor]
"""A node, the axes of its result along which elements are removed, and the mask [their sizes] of those that stay."""


def removal_masks(analysis: FoundSites, gone: Tensor) -> dict[fx.Node, list[Mask]]:
    """Return, by node, a Mask for each input that it sums over and that loses labels of the mask `gone` [labels]."""
    sources, of_nodes = {node.name: node for node in analysis.program.nodes}, dict[fx.Node, list[Mask]]()
    for use in analysis.flow.every_use:
        keep = keep_mask(analysis.flow.groups.of(use.labels), gone)
        if not use.is_of_constant and not bool(keep.all()):
            of_nodes.setdefault(use.node, []).append((sources[use.name], use.axes, keep))
    return of_nodes


class MaskedProgram(fx.Interpreter):
    """An interpreter of the dense program in which removed elements are 0 wherever they would be summed over."""

    def __init__(self, analysis: FoundSites, gone: Tensor) -> None:
        super().__init__(analysis.program.graph)
        self._masks = removal_masks(analysis, gone)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = {source: self.env[source] for source, _, _ in self._masks.get(n, ())}
        for source, axes, keep in self._masks.get(n, ()):
            self.env[source] = zero_removed(self.env[source], axes, keep)
        entering = super().fetch_args_kwargs_from_env(n)
        self.env |= before
        return entering


def zero_removed(tensor: Tensor, axes: tuple[int, ...], keep: Tensor) -> Tensor:
    """Return a tensor, zero where a mask [the sizes of axes] is False, repeated along axes that count the batch too."""
    mask = place_along(keep, axes, tensor.dim())
    times = [have // size if size > 1 else 1 for have, size in zip(tensor.shape, mask.shape, strict=True)]
    return tensor * mask.repeat(times).to(tensor)


def relative_difference(analysis: FoundSites, gone: Tensor, narrowed: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Return the largest difference from masked dense outputs, relative to each's maximum; inf if `narrowed` fails."""
    with torch.no_grad():
        dense = tree_leaves(MaskedProgram(analysis, gone).run(*inputs))
        try:
            new = tree_leaves(narrowed(*inputs))
        except (IndexError, RuntimeError):
            return float("inf")
    pairs = zip(dense, new, strict=True)
    return max((_apart(one, other) for one, other in pairs if isinstance(one, Tensor)), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    apart = (one.double() - other.double()).abs().amax() / one.double().abs().amax().clamp(min=1e-12)
    return float(apart) if bool(apart.isfinite()) else float("inf")


ROUNDING = 1e-4
"""The limit relative to the largest output: float32 rounding in another order, over a whole network, stays below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowedProgram:
    """A narrowed program as a module whose tensors are the `parts` of the dense program's tensors.

    `kept`: the groups by the sites' keys. `unreduced`: the reasons of sites that had to be kept whole, by key.
    `difference`: see relative_difference; None if not compared.
    """

    module: fx.GraphModule
    parts: Parts
    kept: Kept
    unreduced: dict[str, str]
    difference: float | None

    def set_(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the module's tensors to the kept parts of dense tensors, given by their names in the dense program."""
        for name, (dense, keep) in self.parts.items():
            if dense in tensors:
                set_tensor_(self.module, name, kept_part(tensors[dense], keep))


@one_thread()
def narrow(analysis: FoundSites, kept: Kept) -> NarrowedProgram:
    """Return the program narrowed to these groups, without running it; sites that can't be narrowed are kept whole."""
    chosen, unreduced = dict(kept), dict[str, str]()
    while True:
        try:
            goes = removed_labels(analysis, chosen)
            module, parts = remove_elements(analysis.program, analysis.flow, goes)
            return NarrowedProgram(module=module, parts=parts, kept=chosen, unreduced=unreduced, difference=None)
        except NarrowingRefused as refused:
            met = _sites_at(analysis, refused.node, chosen)
            for key in [
                key for unit in jointly_narrowed(analysis, chosen) if not set(unit).isdisjoint(met) for key in unit
            ]:
                unreduced[key] = str(refused)
                del chosen[key]


def _sites_at(analysis: FoundSites, node: fx.Node, chosen: Kept) -> list[str]:
    """Return the keys of chosen sites whose labels a node or its inputs lose; all chosen keys if it loses none."""
    flow = analysis.flow
    every = tree_leaves([flow.values.get(each) for each in (node, *node.all_input_nodes)])
    marks = [each for each in every if isinstance(each, LabelTensor)]
    labels = [flow.groups.of(compact(each.labels)) for each in marks if each.labels is not None]
    units = jointly_narrowed(analysis, chosen)
    own = {tuple(unit): removed_labels(analysis, {key: chosen[key] for key in unit}) for unit in units}
    met = [
        key
        for unit, goes in own.items()
        for key in unit
        if any(not bool(keep_mask(each, goes).all()) for each in labels)
    ]
    return met or list(chosen)


def prove(analysis: FoundSites, kept: Kept, inputs: Sequence[Tensor]) -> NarrowedProgram:
    """Narrow a program and compare it on a batch with the masked dense one; sites that make it differ stay whole.

    Raises BadInput for a program that isn't deterministic, NotFinite if it gives NaN on this batch.
    """
    result = _compared(analysis, kept, inputs)
    if result.difference is not None and result.difference <= ROUNDING:
        return result
    require_steady(analysis.program, inputs)
    narrowed = result.kept
    assert narrowed, f"the unchanged program differs from itself by {result.difference}"
    wrong = _wrong(analysis, narrowed, inputs)
    again = prove(analysis, {key: groups for key, groups in narrowed.items() if key not in wrong}, inputs)
    differs = dict.fromkeys(wrong, "the narrowed program differs from the dense one")
    return replace(again, unreduced=result.unreduced | differs | again.unreduced)


def _compared(analysis: FoundSites, kept: Kept, inputs: Sequence[Tensor]) -> NarrowedProgram:
    result = narrow(analysis, kept)
    apart = relative_difference(analysis, removed_labels(analysis, result.kept), result.module, inputs)
    return replace(result, difference=apart)


def _wrong(analysis: FoundSites, kept: Kept, inputs: Sequence[Tensor]) -> list[str]:
    """Search by halving for sites that make a program differ; return all sites if only several together do."""
    wrong: list[str] = []
    every = jointly_narrowed(analysis, kept)
    for units in (front := [every]):
        part = {key: kept[key] for unit in units for key in unit}
        if len(units) < len(every) and (_compared(analysis, part, inputs).difference or 0.0) <= ROUNDING:
            continue
        if len(units) == 1:
            wrong += units[0]
        else:
            front += [units[: len(units) // 2], units[len(units) // 2 :]]
    return wrong or list(kept)
