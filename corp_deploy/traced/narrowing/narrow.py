"""A program narrowed to what is kept of its sites, proved against the dense one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx, nn

from corp_deploy.traced.finding.choice import Kept, gone
from corp_deploy.traced.finding.compaction import kept
from corp_deploy.traced.finding.heads import together
from corp_deploy.traced.finding.labels import LabelTensor, compact
from corp_deploy.traced.finding.sites import Found
from corp_deploy.traced.programs.tracing import Inputs

from .narrowing import Parts, Refused, part_of, without
from .proof import difference

ROUNDING = 1e-4
"""Of the largest output: what float32 rounds over a network in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """`module` is the program without what went, `parts` what its tensors are of the dense one's; `unreduced`: sites
    that had to be kept, with the reason, by their keys. `difference`: from the dense program with the same elements
    zeroed, relative; None where it wasn't looked at.
    """

    module: fx.GraphModule
    parts: Parts
    kept: Kept
    unreduced: dict[str, str]
    difference: float | None

    def set_(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the module what is left of these in the place of the dense program's, by their names there."""
        for name, (dense, keep) in self.parts.items():
            if dense in tensors:
                owner, _, last = name.rpartition(".")
                is_parameter = isinstance(self.module.get_submodule(owner)._parameters.get(last), nn.Parameter)
                new = part_of(tensors[dense], keep)
                setattr(self.module.get_submodule(owner), last, nn.Parameter(new, False) if is_parameter else new)


def narrow(analysis: Found, kept: Kept) -> Narrowed:
    """The narrower program, by its labels alone; a site that can't be narrowed so is kept whole. Raises BadInput for a
    choice that can't be.
    """
    chosen, unreduced = dict(kept), dict[str, str]()
    while True:
        try:
            goes = gone(analysis.flow, analysis.sites, chosen)
            module, parts = without(analysis.program, analysis.flow, goes)
            return Narrowed(module=module, parts=parts, kept=chosen, unreduced=unreduced, difference=None)
        except Refused as refused:
            met = _at(analysis, refused.node, chosen)
            for key in [key for unit in together(analysis, chosen) if not set(unit).isdisjoint(met) for key in unit]:
                unreduced[key] = str(refused)
                del chosen[key]


def _at(analysis: Found, node: fx.Node, chosen: Kept) -> list[str]:
    """The sites of which elements go at a node; all that are left to go where none is known."""
    flow = analysis.flow
    every = [flow.values.get(each) for each in (node, *node.all_input_nodes)]
    marks = [
        one for each in every for one in (each if isinstance(each, tuple) else (each,)) if isinstance(one, LabelTensor)
    ]
    labels = [flow.groups.of(compact(each.labels)) for each in marks if each.labels is not None]
    units = together(analysis, chosen)
    own = {tuple(unit): gone(flow, analysis.sites, {key: chosen[key] for key in unit}) for unit in units}
    met = [
        key for unit, goes in own.items() for key in unit if any(not bool(kept(each, goes).all()) for each in labels)
    ]
    return met or list(chosen)


def prove(analysis: Found, kept: Kept, inputs: Inputs) -> Narrowed:
    """As `narrow`, held on a batch against the dense program with what went zeroed; sites with which it differs are
    kept whole.
    """
    result = _compared(analysis, kept, inputs)
    if result.difference is not None and result.difference <= ROUNDING:
        return result
    wrong = _wrong(analysis, result.kept, inputs)
    again = prove(analysis, {key: groups for key, groups in result.kept.items() if key not in wrong}, inputs)
    differs = dict.fromkeys(wrong, "the narrowed program differs from the dense one")
    return replace(again, unreduced=result.unreduced | differs | again.unreduced)


def _compared(analysis: Found, kept: Kept, inputs: Inputs) -> Narrowed:
    result = narrow(analysis, kept)
    apart = difference(analysis, gone(analysis.flow, analysis.sites, result.kept), result.module, inputs)
    return replace(result, difference=apart)


def _wrong(analysis: Found, kept: Kept, inputs: Inputs) -> list[str]:
    """The sites that differ by themselves, looked for by halves; all where only some together do."""
    wrong: list[str] = []
    every = together(analysis, kept)
    for units in (front := [every]):
        part = {key: kept[key] for unit in units for key in unit}
        if len(units) < len(every) and (_compared(analysis, part, inputs).difference or 0.0) <= ROUNDING:
            continue
        if len(units) == 1:
            wrong += units[0]
        else:
            front += [units[: len(units) // 2], units[len(units) // 2 :]]
    return wrong or list(kept)
