"""The layers of a traced model's segment that a polish fits, with the derivative of the segment's output by each layer.

All operations behind a layer are differentiated, rotary positions and norms too. If the layer's output is only added to
the stream, its Gauss-Newton step is the regression on its inputs.

Legend: B inputs, N tokens of a stream, C channels, X rows of layers' inputs or outputs, R outputs, D inputs, among them
a constant one if there is a bias.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from corp_deploy.algebra.gauss_newton import LayerTangent, Residuals, with_one
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction.layer_targets import output_rows
from corp_deploy.reduction.stream_walk import Values, run_on_batch
from corp_deploy.traced.finding.cuts import required_nodes
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.models.segments import ProgramSegment, TokenRows
from corp_deploy.traced.models.sites import Site, TracedStream
from corp_deploy.traced.models.steps import SegmentStep
from corp_deploy.traced.models.token_merging import Tokens
from corp_deploy.traced.programs.attention_masks import unread_queries
from corp_deploy.traced.programs.folding import is_mean_weight
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import LINEAR, CalledLayer, layer_as_module, layers

from .newton import LayerGroup, Matrix, Sublayer, token_weights_behind
from .walk import StreamPair

_CACHED_BYTES = 2**30


def spatial_sites(model: nn.Module, sites: Sequence[str]) -> list[str]:
    """Return those of the sites that are written or read by a convolution other than 1x1 without stride and padding."""
    own, by_name = tracing(model), sites_of(model).by_name
    of_places = {each.weight for each in layers(own.program, in_groups=True) if not _is_linear(own.program, each)}
    return [name for name in sites if not of_places.isdisjoint(_site_weights(by_name[name]))]


def segment_sublayer(model: nn.Module, step: SegmentStep) -> Sublayer:
    """Return the sublayer of a step: the linear layers that write or read its sites, except streams.

    Layers with the same input form one group. Layers that the program calls several times are left out.
    """
    own, by_name = tracing(model), sites_of(model).by_name
    program, segment = own.followed, next(each for each in own.segments if each.name == step.name)
    inside = [by_name[name] for name in step.sites if name in by_name]
    touched = {name for site in inside if not isinstance(site, TracedStream) for name in _site_weights(site)}
    nodes = required_nodes(program, segment.before, [segment.after], beside=segment.beside)
    together = dict[tuple[fx.Node, bool], list[CalledLayer]]()
    for layer in layers(program):
        if layer.weight not in touched or layer.node not in nodes or len(own.uses[layer.weight]) > 1:
            continue
        weight = program.tensor(layer.weight)
        is_own = isinstance(weight, nn.Parameter) and not is_mean_weight(layer.weight)
        if is_own and weight.numel() > 0 and _is_linear(program, layer):
            together.setdefault((layer.node.all_input_nodes[0], layer.bias in own.added), []).append(layer)
    read, groups = _find_read_tokens(own, segment, step.module), list[LayerGroup]()
    for (_, is_biasless), called in together.items():
        way = _SegmentPath(
            program=program, nodes=tuple(nodes), segment=segment, read_X=read, step=step.module, called=tuple(called)
        )
        alone = [CalledLayer(node=each.node, weight=each.weight, bias="") if is_biasless else each for each in called]
        matrices = (Matrix(name=each.name, layer=layer_as_module(program, each)) for each in alone)
        look = partial(_find_residuals, way, is_biasless)
        groups.append(LayerGroup(matrices=tuple(matrices), linearised=partial(_CachedResiduals, look)))
    return Sublayer(step=step, read=read, groups=tuple(groups))


def _site_weights(site: Site) -> set[str]:
    return {span.name for span in (*site.groups.writers, *site.groups.readers)}


def _is_linear(program: Program, layer: CalledLayer) -> bool:
    """Return whether a layer maps each token or pixel by itself: linear layers and 1x1 convolutions."""
    if layer.node.target is LINEAR:
        return True
    module = layer_as_module(program, layer)
    assert isinstance(module, nn.Conv2d), layer
    return module.kernel_size == module.stride == (1, 1) and module.padding == (0, 0)


def _find_read_tokens(own: Tracing, segment: ProgramSegment, module: TokenRows) -> Tensor | None:
    """Return the indices of the tokens behind the segment that any output depends on, None for all."""
    gone = unread_queries(own.program, segment.cut) if module.leaving.axis == len(module.leaving.sizes) else None
    read_N = None if gone is None else ~gone.flatten()
    if own.merged is not None:
        read_N = own.merged.read_of(segment.after, read_N)
    return None if read_N is None else read_N.nonzero()[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentPath:
    """The computation from the inputs of the `called` layers to the end of their segment, whose nodes are `nodes`."""

    program: Program
    nodes: tuple[fx.Node, ...]
    segment: ProgramSegment
    read_X: Tensor | None
    step: TokenRows
    called: tuple[CalledLayer, ...]

    def values(self, tokens: Tokens) -> Values:
        """Return the value of every node of the segment, by node, for a stream that enters it."""
        nodes = (self.segment.before, *self.segment.beside)
        return run_on_batch(self.program, self.nodes, dict(zip(nodes, self.step.tensors(tokens), strict=True)))

    def read(self, x_BNC: Tensor) -> Tensor:
        """Flatten a stream behind the segment to rows [X,C], of the read tokens only."""
        return (x_BNC if self.read_X is None else x_BNC[:, self.read_X]).flatten(0, 1)

    def behind(self) -> Iterator[fx.Node]:
        """Yield the segment's nodes that depend on the layers' outputs."""
        layer_nodes = {each.node for each in self.called}
        for node in self.nodes:
            if node not in layer_nodes and not layer_nodes.isdisjoint(node.all_input_nodes):
                layer_nodes.add(node)
                yield node

    def through(self, values: Values, given_XR: Tensor) -> Tensor:
        """Compute the read rows of the stream behind the segment [X,C] from outputs `given_XR` of the layers."""
        behind, nodes = list(self.behind()), [each.node for each in self.called]
        parts = given_XR.split([values[layer].shape[_axis(layer)] for layer in nodes], dim=-1)
        outputs = {layer: _unflatten_rows(part, values[layer], layer) for layer, part in zip(nodes, parts, strict=True)}
        beside = {each: values[each] for node in behind for each in node.all_input_nodes if each not in behind}
        before = {self.segment.before: values[self.segment.before]}
        with sdpa_kernel(SDPBackend.MATH):  # other backends have no second derivative
            end = run_on_batch(self.program, behind, before | beside | outputs)[self.segment.after]
        return self.read(self.step.leaving.rows(end))


def _axis(node: fx.Node) -> int:
    return -1 if node.target is LINEAR else 1


def _unflatten_rows(rows_XR: Tensor, like: Tensor, node: fx.Node) -> Tensor:
    axis = _axis(node)
    return rows_XR.reshape(like.movedim(axis, -1).shape).movedim(-1, axis)


def _find_residuals(way: _SegmentPath, is_biasless: bool, pair: StreamPair) -> tuple[Residuals, int]:
    """Return a pair's residuals behind the segment with their tangent, and the bytes that they take."""
    present_BN = pair.reduced.tokens.sizes
    values = way.values(pair.reduced.tokens)
    first = way.called[0].node
    entering_XD = output_rows(values[first.all_input_nodes[0]], first)
    given_XR = torch.cat([output_rows(values[each.node], each.node) for each in way.called], dim=-1)
    entering_XD = entering_XD if is_biasless else with_one(entering_XD)
    tangent = LayerTangent.of(entering_XD, given_XR, partial(way.through, values))
    weight_X = way.read(token_weights_behind(way.read_X, pair).unsqueeze(-1)).flatten()
    lacking = Residuals(
        tangent=tangent,
        residual_XO=way.read(pair.target) - tangent.out_XO.detach(),
        weight_X=None if present_BN is None else weight_X,
    )
    return lacking, tangent.size_bytes


class _CachedResiduals:
    """The residuals of some pairs, one of each; those beyond 1 GiB in all are computed again in each iteration."""

    def __init__(self, look: Callable[[StreamPair], tuple[Residuals, int]], pairs: Sequence[StreamPair]) -> None:
        self._look, self._pairs, self._left = look, pairs, _CACHED_BYTES
        self._cached: dict[int, Residuals] = {}

    def __iter__(self) -> Iterator[Residuals]:
        for index, pair in enumerate(self._pairs):
            if index in self._cached:
                yield self._cached[index]
                continue
            lacking, size = self._look(pair)
            if size <= self._left:
                self._left -= size
                self._cached[index] = lacking
            yield lacking
