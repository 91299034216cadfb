"""Layers of a traced model as modules, whatever they are in the model: heard all at once, and given other weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from corp_deploy.traced.finding.cuts import between, cuts
from corp_deploy.traced.finding.site import Kind
from corp_deploy.traced.finding.sites import Found
from corp_deploy.traced.programs.batch import batch_of
from corp_deploy.traced.programs.readers import InFront, Layer, layers, listening
from ground.errors import BadInput

from .traced_facts import tracing_of_all_tokens
from .traced_narrowing import narrowed


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
    """What runs as the model does, from one of its cuts to the next, with its layers as modules that share its weights.
    Raises BadInput where it runs at one batch size alone.
    """
    own = tracing_of_all_tokens(model, "k:n sparse layers")
    if not own.program.any_batch:
        raise BadInput(f"{own.program.model}: its program is for one batch size alone, so that no layer can be heard")
    uses: Counter[str] = Counter()
    for node in own.program.nodes:
        uses[str(node.target)] += len(node.users) if node.op == "get_attr" else 0
    run, every = nn.Sequential(), dict[str, ProgramLayer]()
    for start, end in pairwise([None, *(cut.node for cut in cuts(own.found)), None]):
        piece = replace(own.program, graph=between(own.program, start, end))
        called = [each for each in layers(piece) if batch_of(each.node.all_input_nodes[0]) is not None]
        heard = listening(piece, {each.node.name for each in called}, ())[0]
        for each in called:
            path = f"listened.{each.node.name}"
            inside = ".layer" if isinstance(heard.get_submodule(path), InFront) else ""
            known = ProgramLayer(
                name=each.name,
                path=f"{len(run)}.{path}{inside}",
                weight=each.weight,
                bias=each.bias,
                uses=uses[each.weight],
                kinds=_kinds(own.found, each.weight),
            )
            every.setdefault(each.weight, known)
        run.append(heard)
    return run, tuple(every.values())


def _kinds(found: Found, weight: str) -> frozenset[Kind]:
    """Of sites that write or read a weight."""
    by_site = ((site.kind, {span.name for span in (*site.writers, *site.readers)}) for site in found.sites)
    return frozenset(kind for kind, names in by_site if weight in names)


def relayered(model: nn.Module, of: Mapping[str, Layer], every: tuple[ProgramLayer, ...]) -> nn.Module:
    """The model with the weights that these layers have, by their names."""
    weights = {each.weight: of[each.name].weight for each in every if each.name in of}
    biases = {each.bias: bias for each in every if each.name in of and (bias := of[each.name].bias) is not None}
    return narrowed(model, {}, {**weights, **biases})
