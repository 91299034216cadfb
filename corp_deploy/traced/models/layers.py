"""Layers of a traced model as modules, whatever they are in the model: heard all at once, and given other weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from corp_deploy.traced.finding.cuts import between, cuts
from corp_deploy.traced.finding.site import Kind
from corp_deploy.traced.finding.sites import Found
from corp_deploy.traced.programs.program import Program, batch_of
from corp_deploy.traced.programs.readers import BatchFirst, Layer, layers, listening
from ground.errors import BadInput

from .mergeable import Mergeable
from .merged_program import CutState
from .module import Tracing, tracing
from .narrowing import narrowed
from .token_merging import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLayer:
    """A layer by the name of its weight, and where its module is in what `layered` gives. `uses` of its weight in the
    whole program; `kinds` of the sites that it writes or reads.
    """

    name: str
    path: str
    weight: str
    bias: str
    uses: int
    kinds: frozenset[Kind]


def layered(model: nn.Module) -> tuple[nn.Sequential, tuple[ProgramLayer, ...]]:
    """What runs as the model does, from one of its cuts to the next, with the inputs beside the first at each, with its
    layers as modules that share its weights. Raises BadInput where it runs at one batch size alone.
    """
    own = tracing(model)
    if not own.program.any_batch:
        raise BadInput(f"{own.program.model}: its program is for one batch size only, so its layers can't be observed")
    uses: Counter[str] = Counter()
    for node in own.program.nodes:
        uses[str(node.target)] += len(node.users) if node.op == "get_attr" else 0
    run, every = nn.Sequential(), dict[str, ProgramLayer]()
    program, crossings = _crossings(own)
    for start, end in pairwise([None, *crossings, None]):
        piece = replace(program, graph=_between(program, start, end, merges=own.merging is not None))
        called = [each for each in layers(piece) if batch_of(each.node.all_input_nodes[0]) is not None]
        hooked, modules, _ = listening(piece, {each.node.name for each in called}, ())
        for each in called:
            if each.bias in own.biasless:
                modules[each.node.name].bias = None
            path = f"listened.{each.node.name}"
            inside = ".layer" if isinstance(hooked.get_submodule(path), BatchFirst) else ""
            path = path if own.merging is None else f"module.{path}"
            layer = ProgramLayer(
                name=each.name,
                path=f"{len(run)}.{path}{inside}",
                weight=each.weight,
                bias=each.bias,
                uses=uses[each.weight],
                kinds=_kinds(own.analysis, each.weight),
            )
            every.setdefault(each.weight, layer)
        run.append(hooked if own.merging is None else _OfTokens(hooked, end))
    return run, tuple(every.values())


class _OfTokens(nn.Module):
    """What stands between two cuts of a program whose tokens are merged: Tokens of Tokens, in front of the first cut of
    inputs, behind the last one outputs.
    """

    def __init__(self, module: nn.Module, end: CutState | None) -> None:
        super().__init__()
        self.module, self.end = module, end

    def forward(self, stream: Tensor | Tokens) -> Any:
        entering = stream if isinstance(stream, Tokens) else (stream,)
        leaving = self.module(*(each for each in entering if each is not None))
        if self.end is None:
            return leaving
        names = [name for name in ("sizes", "sources") if getattr(self.end, name) is not None]
        return Tokens(leaving[0], **dict(zip(names, leaving[1:], strict=True)))


def _crossings(own: Tracing) -> tuple[Program, list[CutState]]:
    """What runs, and what crosses its cuts; where tokens are merged with all that is known of them."""
    nodes = [cut.node for cut in cuts(own.analysis)]
    if own.merging is None:
        return own.program, [CutState(raw=node, node=node) for node in nodes]
    assert isinstance(own.mergeable, Mergeable), own.mergeable
    fewer = own.mergeable.merged(own.program, own.merging, follows=True)
    return fewer.program, [fewer.crossing(node) for node in nodes]


def _between(program: Program, start: CutState | None, end: CutState | None, *, merges: bool) -> fx.GraphModule:
    before, beside = (None, ()) if start is None else (start.node, start.token_state)
    outputs = [end.node, *end.token_state] if merges and end is not None else None
    return between(program, before, None if end is None else end.node, beside=beside, outputs=outputs)


def _kinds(analysis: Found, weight: str) -> frozenset[Kind]:
    """Of sites that write or read a weight."""
    by_site = ((site.kind, {span.name for span in (*site.writers, *site.readers)}) for site in analysis.sites)
    return frozenset(kind for kind, names in by_site if weight in names)


def relayered(model: nn.Module, of: Mapping[str, Layer], every: tuple[ProgramLayer, ...]) -> nn.Module:
    """The model with the weights that these layers have, by their names."""
    weights = {each.weight: of[each.name].weight for each in every if each.name in of}
    biases = {each.bias: bias for each in every if each.name in of and (bias := of[each.name].bias) is not None}
    return narrowed(model, {}, {**weights, **biases})
