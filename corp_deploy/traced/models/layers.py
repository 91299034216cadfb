"""Layers of a traced model as modules to hook or to give other weights, and equivalent orders of its sites' groups.

Legend: G groups of a site, M places of one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from corp_deploy.traced.finding.cuts import extract_between, find_cuts
from corp_deploy.traced.finding.site_groups import Kind, SiteGroups
from corp_deploy.traced.finding.sites import find_sites
from corp_deploy.traced.programs.program import SAME, Program, batch_axis_of, count_uses, operation
from corp_deploy.traced.programs.readers import CONV2D, LINEAR, BatchFirst, Layer, build_listening_graph, layers
from ground.errors import BadInput

from .mergeable import Mergeable
from .merged_program import CutState
from .module import tracing
from .narrowed_model import narrow_model
from .segments import crossing
from .token_merging import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLayer:
    """A layer, its module's path in the layered model, its weight's and bias's names, and the weight's number of uses.

    `kinds`: the kinds of the sites that the layer writes or reads.
    """

    name: str
    path: str
    weight: str
    bias: str
    uses: int
    kinds: frozenset[Kind]


def build_layered_model(model: nn.Module) -> tuple[nn.Sequential, tuple[ProgramLayer, ...]]:
    """Build a model that runs from cut to cut, with layers as modules that share its weights; return it and the layers.

    Each part takes the stream and the side inputs. Raises BadInput for a program of one batch size.
    """
    own = tracing(model)
    if not own.program.any_batch:
        raise BadInput(f"{own.program.model}: its program is for one batch size only, so its layers can't be observed")
    uses = count_uses(own.program)
    by_site = [(site.kind, {span.name for span in (*site.writers, *site.readers)}) for site in own.analysis.sites]
    run, every = nn.Sequential(), dict[str, ProgramLayer]()
    merged = None
    if own.merging is not None:
        assert isinstance(own.mergeable, Mergeable), own.mergeable
        merged = own.mergeable.merged(own.program, own.merging, follows=True)
    program = own.program if merged is None else merged.program
    for start, end in pairwise([None, *(crossing(merged, cut.node) for cut in find_cuts(own.analysis)), None]):
        before, beside = (None, ()) if start is None else (start.node, start.token_state)
        outputs = [end.node, *end.token_state] if merged is not None and end is not None else None
        part = extract_between(program, before, None if end is None else end.node, beside=beside, outputs=outputs)
        piece = replace(program, graph=part)
        called = [each for each in layers(piece) if batch_axis_of(each.node.all_input_nodes[0]) is not None]
        hooked, modules, _ = build_listening_graph(piece, {each.node.name for each in called}, (), {})
        for each in called:
            if each.bias in own.biasless:
                modules[each.node.name].bias = None
            path = f"listened.{each.node.name}"
            inside = ".layer" if isinstance(hooked.get_submodule(path), BatchFirst) else ""
            path = path if merged is None else f"module.{path}"
            layer = ProgramLayer(
                name=each.name,
                path=f"{len(run)}.{path}{inside}",
                weight=each.weight,
                bias=each.bias,
                uses=uses[each.weight],
                kinds=frozenset(kind for kind, names in by_site if each.weight in names),
            )
            every.setdefault(each.weight, layer)
        run.append(hooked if merged is None else _OfTokens(hooked, end))
    return run, tuple(every.values())


class _OfTokens(nn.Module):
    """A part of a program that merges tokens: maps Tokens to Tokens, the first part inputs, the last to outputs."""

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


def replace_layers(model: nn.Module, of: Mapping[str, Layer], every: tuple[ProgramLayer, ...]) -> nn.Module:
    """Return a copy of the model with the weights and biases of the modules `of`, by the names of layers in `every`."""
    weights = {each.weight: of[each.name].weight for each in every if each.name in of}
    biases = {each.bias: bias for each in every if each.name in of and (bias := of[each.name].bias) is not None}
    return narrow_model(model, {}, {**weights, **biases})


def find_streams(model: nn.Module) -> tuple[SiteGroups, ...]:
    """Return the streams whose channels can be reordered, as all their writers, readers and norms are known.

    Raises BadInput if there is none.
    """
    program = tracing(model).program
    found = tuple(each for each in find_sites(program, keeps_all=True).sites if each.kind == "stream")
    if not found:
        raise BadInput(
            f"--sparse-permute stream: {program.model} has no residual stream of which all writers and readers are "
            "known and that isn't an output of the model; give --sparse-permute inside"
        )
    return found


def stream_scores(model: nn.Module, stream: SiteGroups) -> Tensor:
    """Return sum_o (w_oj gamma_j)^2 over all readers of a stream, by channel j [G], float64.

    After a norm of scale gamma_j a channel's variance is about gamma_j^2; w are the readers' weights.
    """
    program, every = tracing(model).program, list[Tensor]()
    nodes, read = {node.name: node for node in program.nodes}, {span.name: span for span in stream.readers}
    for tap in stream.listening:
        layer, source = nodes[tap.reader], nodes[tap.name]
        if layer.target in (LINEAR, CONV2D):
            span = read[str(layer.all_input_nodes[1].target)]
            squares = _laid_out(program.tensor(span.name).detach().double().square(), span.axes)
            gain = _gain(program, source)
            total_GM = squares.reshape(-1, squares.shape[-1]).sum(dim=0)[span.index_GM]
            every.append((total_GM if gain is None else total_GM * gain.square()[tap.index_GM]).sum(dim=1))
    return torch.stack(every).sum(dim=0)


def _gain(program: Program, source: fx.Node) -> Tensor | None:
    """Return the scale by channel, float64, of the layer or RMS norm that gives a node; None without one."""
    while operation(source) in SAME | {"select", "slice"}:
        source = source.all_input_nodes[0]
    weight = source.args[2] if operation(source) in ("layer_norm", "rms_norm") and len(source.args) > 2 else None
    return program.tensor(str(weight.target)).detach().double() if isinstance(weight, fx.Node) else None


def _laid_out(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    return tensor.movedim(axes, tuple(range(-len(axes), 0))).flatten(-len(axes))


def reorder_groups(model: nn.Module, site: SiteGroups, order_G: Tensor) -> nn.Module:
    """Return a copy of the model whose group g of a site is the model's group order_G[g]."""
    program, tensors = tracing(model).program, dict[str, Tensor]()
    for span in {(span.name, span.axes): span for span in site.spans}.values():
        # The elements of each group take the places of another's.
        tensor = tensors.get(span.name, program.tensor(span.name))
        to, source = torch.from_numpy(span.index_GM), torch.from_numpy(span.index_GM)[order_G]
        flat = _laid_out(tensor, span.axes)
        new = flat.index_copy(-1, to.reshape(-1), flat[..., source.reshape(-1)])
        apart: Tensor = new.unflatten(-1, [tensor.shape[axis] for axis in span.axes])
        tensors[span.name] = apart.movedim(tuple(range(-len(span.axes), 0)), span.axes)
    return narrow_model(model, {}, tensors)


def input_block_of(model: nn.Module, weight: str) -> tuple[SiteGroups, int] | None:
    """Return the site whose groups are this layer's inputs, in order and read by no other, and its groups per part.

    Inputs may be reordered within a part, such as a head. Returns None without such a site.
    """
    own = tracing(model)
    reads = ((site, span) for site in own.analysis.sites for span in site.readers if span.name == weight)
    site, span = next(reads, (None, None))
    if site is None or span is None or len(site.readers) > 1 or len(own.uses[weight]) > 1:
        return None
    is_whole = site.size == own.program.tensor(weight).shape[1] and span.axes == (1,)
    # The groups have to be consecutive inputs, part by part.
    rises = np.array_equal(span.index_GM, np.arange(site.size)[:, None])
    rises = rises and (site.part_G is None or bool((np.diff(site.part_G) >= 0).all()))
    return (site, site.size // site.parts) if is_whole and rises else None
