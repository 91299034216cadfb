"""Models with k:n sparse layers: patterns are chosen and weights refitted layer by layer, in the order they run.

A layer's fit takes the inputs from the model in which the layers before it are sparse already, and the targets from the
model without zeros (asymmetric calibration, arXiv 2504.02692), so that the layer compensates for zeros in front of it
too. No label is used.

Legend: B inputs, N tokens, G groups of a convolution (1 of a linear layer), O rows, K inputs of a row.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from calib.inputs import InputSet, tensors_by_name, to_device
from calib.sites import evaluating
from corp_deploy.algebra.regression import RegressionSums
from corp_deploy.algebra.sparse_patterns import cast_order, saliency
from corp_deploy.algebra.sparse_refit import Objective, Sparse, sparse_layer
from corp_deploy.families import traced_model
from corp_deploy.spec.sparsity import (
    DEFAULT_PERMUTE,
    DEFAULT_RULE,
    RIDGE_REL,
    Permute,
    Rule,
    SparseKind,
    Sparsity,
    Target,
)
from corp_deploy.traced.finding.site_groups import SiteGroups
from corp_deploy.traced.models.layers import (
    build_layered_model,
    find_streams,
    reorder_groups,
    replace_layers,
    stream_scores,
)
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.models.token_merging import Tokens
from ground.errors import BadInput

from .sparse_places import LayerSparsity, SparsePlace, SparsityReport, sparse_places_of_program
from .streams import refuse_nonfinite

State = tuple[Any, ...]
"""The inputs of a part of a model, in order."""


class _Reached(Exception):
    """A signal that ends a run once the wanted layer has run."""


def run_part(part: nn.Module, entering: State) -> State:
    """Run a part of a model and return the inputs of the next part: the output, then the same other inputs."""
    return (part(*entering), *entering[1:])


def inputs_and_outputs(part: nn.Module, state: State, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Run a part of a model up to a layer and return that layer's input and output."""
    found: list[tuple[Tensor, Tensor]] = []

    def hear(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        found.append((inputs[0], y))
        raise _Reached

    handle = layer.register_forward_hook(hear)
    try:
        with suppress(_Reached):
            run_part(part, state)
    finally:
        handle.remove()
    return found[0]


def called_layers(part: nn.Module, state: State, layers: Mapping[str, nn.Module]) -> tuple[list[str], State]:
    """Return the names of these layers in the order of a part's calls, and the inputs of the next part."""
    came: list[str] = []
    handles = [layer.register_forward_hook(lambda *_, name=name: came.append(name)) for name, layer in layers.items()]
    try:
        return came, run_part(part, state)
    finally:
        for handle in handles:
            handle.remove()


@dataclass(slots=True)
class Pair:
    """The values of a few inputs before a part, in the reduced model and in the sparse one."""

    reduced: State
    sparse: State
    inputs: int
    weights_BN: Tensor | None = None

    def weights(self, x: Tensor) -> Tensor | None:
        """Return the token weights of a layer's input, None if all count alike or the input isn't made of tokens."""
        tokens = self.sparse[0]
        weights_BN = tokens.sizes if isinstance(tokens, Tokens) else self.weights_BN
        return None if weights_BN is None or x.shape[:-1] != weights_BN.shape else weights_BN


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsifying:
    """The patterns by kind of site, the rule that chooses, and whether inputs are reordered first.

    Without `refits` the kept weights keep their values, for comparison.
    """

    kinds: Mapping[SparseKind, Sparsity]
    rule: Rule = DEFAULT_RULE
    permute: Permute = DEFAULT_PERMUTE
    ridge_rel: float = RIDGE_REL
    target: Target = "reduced"
    refits: bool = True


def _sums(
    place: SparsePlace, before: nn.Module | None, parts: tuple[nn.Module, nn.Module], pairs: Sequence[Pair]
) -> list[RegressionSums]:
    """Sum the layer's input in the sparse model and its target, for each group of a convolution.

    The target is the output of the same layer in the reduced model, `before`; without `before`, it is the layer's
    output in the sparse model. `parts` are the parts of both models that hold the layer.
    """
    weight_GOK = place.weight_rows()
    sums = [
        RegressionSums.empty(inputs=weight_GOK.shape[2], outputs=weight_GOK.shape[1], device=weight_GOK.device)
        for _ in weight_GOK
    ]
    for pair in pairs:
        x, y = inputs_and_outputs(parts[1], pair.sparse, place.layer)
        if before is not None:
            _, y = inputs_and_outputs(parts[0], pair.reduced, before)
        weights = pair.weights(x)
        there = slice(None) if weights is None else weights.flatten() > 0.0
        counted = None if weights is None else weights.flatten()[there].unsqueeze(0)
        for own, x_NK, y_NO in zip(sums, place.entering(x), place.leaving(y), strict=True):
            own.add(x_NK[there].unsqueeze(0), y_NO[there].unsqueeze(0), counted)
    return sums


def _make_sparse_(
    place: SparsePlace, sums: Sequence[RegressionSums], how: Sparsifying, inputs: int
) -> tuple[LayerSparsity, Tensor | None]:
    """Choose the layer's pattern, refit its weights by sums over `inputs` inputs, and set them.

    Return the report and the new order of the layer's inputs, None if the order is unchanged.
    """
    sparsity, weight_GOK = how.kinds[place.kind], place.weight_rows()
    bias_GO = weight_GOK.new_zeros(weight_GOK.shape[:2])
    if place.layer.bias is not None:
        bias_GO = place.layer.bias.detach().double().view_as(bias_GO)
    for each in sums:
        refuse_nonfinite(place.name, torch.cat((each.tx_OK.flatten(), each.x.sum_K, each.tt.view(1))))
    regressions = [each.regression() for each in sums]
    back_K, order_K = torch.arange(weight_GOK.shape[2], device=weight_GOK.device), None
    if how.permute != "none" and place.site is not None and not place.block % sparsity.of:
        score_K = saliency(weight_GOK[0], regressions[0].covariance_KK.diagonal())
        order_K = cast_order(score_K, sparsity, block=place.block)
        back_K = order_K.argsort()
        regressions, weight_GOK = [regressions[0].of(order_K)], weight_GOK[:, :, order_K]
    sparse, fits_bias = list[Sparse](), place.layer.bias is not None
    for regression, weight_OK, bias_O in zip(regressions, weight_GOK, bias_GO, strict=True):
        own = Objective(regression=regression, dense_OK=weight_OK, ridge_rel=how.ridge_rel, fits_bias=fits_bias)
        sparse.append(sparse_layer(own, bias_O, sparsity, how.rule, refits=how.refits))
    place.fill_(
        torch.stack([each.weight_OK[:, back_K] for each in sparse]), torch.stack([each.bias_O for each in sparse])
    )
    macs = round(sum(own.x.tokens * each.weight_OK.numel() for own, each in zip(sums, sparse, strict=True)) / inputs)
    report = LayerSparsity(
        layer=place.name,
        kind=place.kind,
        pattern=str(sparsity),
        reordered=order_K is not None,
        energy=sum(each.energy for each in sparse),
        error_dense=sum(each.error_dense for each in sparse),
        error_masked=sum(each.error_masked for each in sparse),
        error=sum(each.error for each in sparse),
        macs=macs,
        macs_of_zeros=round(macs * (1.0 - sparsity.share)),
    )
    return report, order_K


def _sort_places(
    every: list[SparsePlace], how: Sparsifying, state: State, model: nn.Sequential
) -> tuple[list[SparsePlace], dict[str, str]]:
    """Return all places in the order they run, and by name the reasons why some can't be sparse."""
    came: list[str] = []
    layers = {place.name: place.layer for place in every}
    for part in model:
        called, state = called_layers(part, state, layers)
        came += called
    left: dict[str, str] = {}
    for place in every:
        times = came.count(place.name)
        once = "" if times == 1 else f"it runs {times} times for an input"
        if reason := once or place.reason(how.kinds[place.kind]):
            left[place.name] = reason
    order = {name: at for at, name in enumerate(came)}
    return sorted(every, key=lambda place: order.get(place.name, len(came))), left


def _reorder_streams(model: nn.Module, kinds: Mapping[SparseKind, Sparsity]) -> nn.Module:
    sizes = {sparsity.of for sparsity in kinds.values()}
    for stream in find_streams(model):
        score_C = stream_scores(model, stream)
        if len(sizes) > 1 or len(score_C) % max(sizes):
            raise BadInput(
                f"--sparse-permute stream: one order of {len(score_C)} channels can't serve groups of "
                f"{' and '.join(map(str, sorted(sizes)))}; give --sparse-permute inside"
            )
        model = reorder_groups(model, stream, cast_order(score_C, next(iter(kinds.values()))))
    return model


@torch.no_grad()
def sparsify(
    reduced: nn.Module,
    inputs: InputSet,
    how: Sparsifying,
    *,
    batch_size: int = 32,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[nn.Module, SparsityReport]:
    """Return a copy of the model with k:n sparse layers, refitted on these inputs, and the report of each layer.

    In a model that merges tokens, targets are layers' outputs in the sparse model itself, which merges other tokens
    than the reduced one. Memory: two residual streams of all inputs in float32. `on_progress` receives the number of
    finished layers and of all.

    Raises:
        BadInput: no layer can be sparse, or activations are not finite.
    """
    if how.permute == "stream":
        reduced = _reorder_streams(reduced, how.kinds)
    before, traced = build_layered_model(reduced)
    own = copy.deepcopy(before)
    orders = list[tuple[SiteGroups, Tensor]]()
    every = list(sparse_places_of_program(reduced, own, traced, how.kinds))
    if traced_model.merging_of(reduced) is not None:
        how = replace(how, target="own")
    with evaluating(before), evaluating(own):
        pairs = []
        for here in (to_device(batch, device_of(before)) for batch in inputs.batches(batch_size)):
            entering = tuple(tensors_by_name(here).values())
            pairs.append(Pair(entering, entering, len(entering[0]), traced_model.token_weights(reduced, here)))
        places, left = _sort_places(every, how, pairs[0].sparse, own)
        count, reports = sum(pair.inputs for pair in pairs), dict[str, LayerSparsity]()
        waiting = {place.name: place for place in places if place.name not in left}
        for parts in zip(before, own, strict=True):
            layers = {name: place.layer for name, place in waiting.items()}
            for name in called_layers(parts[1], pairs[0].sparse, layers)[0]:
                place = waiting.pop(name)
                target = before.get_submodule(place.path) if how.target == "reduced" else None
                reports[name], order_K = _make_sparse_(place, _sums(place, target, parts, pairs), how, count)
                if order_K is not None and place.site is not None:
                    orders.append((place.site, order_K))
                if on_progress is not None:
                    on_progress(len(reports), len(reports) + len(waiting))
            if not waiting:
                break
            for pair in pairs:
                pair.reduced, pair.sparse = run_part(parts[0], pair.reduced), run_part(parts[1], pair.sparse)
    listed = [
        reports.get(each.name) or LayerSparsity(layer=each.name, kind=each.kind, reason=left[each.name])
        for each in places
    ]
    if not reports:
        kinds = ", ".join(f"{kind}={pattern}" for kind, pattern in how.kinds.items())
        why = "; ".join(dict.fromkeys(f"{each.layer}: {each.reason}" for each in listed[:3]))
        raise BadInput(
            f"--sparse {kinds}: no layer can be sparse ({why or 'the model has none of these kinds'}); leave it out"
        )
    report = SparsityReport(rule=how.rule, permute=how.permute, target=how.target, layers=tuple(listed))
    new = replace_layers(reduced, {place.name: place.layer for place in places if place.name in reports}, traced)
    for site, order_G in orders:
        new = reorder_groups(new, site, order_G)
    return new.eval().requires_grad_(False), report
