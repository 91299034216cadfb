"""Every reduced sublayer in turn fitted to the dense stream, from what the reduced stream has before it.

Legend: B inputs, N tokens, C channels.
"""

from collections.abc import Callable

from torch import nn

from calib.inputs import InputSet
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.families.widths import is_empty
from corp_deploy.reduction.streams import Pair, embedded
from corp_deploy.traced.models.steps import Merge, SegmentStep, Unmerge

from .newton import AlternatingFit, Newton
from .parts import Parts
from .segments import segment_sublayer
from .subject import Subject

_AT_ONCE = 8  # inputs of a forward pass and of a product


def pairs_of(dense: nn.Module, fitted: InputSet, held_out: InputSet) -> list[Pair]:
    """Both streams where they are one yet, before the first block. Memory: up to 2 * inputs * N * C * 4 bytes."""
    return [
        Pair(dense=x_BNC, reduced=x_BNC, held_out=is_held_out, weights_BN=weights_BN)
        for inputs, is_held_out in ((fitted, False), (held_out, True))
        for x_BNC, weights_BN in embedded(dense, inputs, _AT_ONCE)
    ]


def reduced_sites(dense: nn.Module, model: nn.Module) -> list[str]:
    """The sites that are narrower than the dense model's and have anything to fit."""
    widths = {site.name: site.as_metadata() for site in sites_of(dense).every}
    narrower = (site for site in sites_of(model).every if widths.get(site.name) != site.as_metadata())
    return [site.name for site in narrower if not is_empty(site.width)]


Fit = Callable[[SegmentStep, str, list[Pair]], None]


def fitted_steps(dense: nn.Module, model: nn.Module) -> list[str]:
    """The names of the reduced model's steps that a narrower site stands in: its branches, and of a traced one its
    segments.
    """
    narrower = set(reduced_sites(dense, model))
    segments = [step for step in traced_model.steps(model) if isinstance(step, SegmentStep)]
    return [step.name for step in segments if not narrower.isdisjoint(step.sites)]


def walk_layers(dense: nn.Module, model: nn.Module, pairs: list[Pair], fit: Fit) -> None:
    """Take both streams through both models, and `fit` each branch or segment of the reduced one that has a narrower
    site, in place; the dense stream is behind it then, the reduced one before it.
    """
    fitted = set(fitted_steps(dense, model))
    before = (step for step in traced_model.steps(dense) if isinstance(step, SegmentStep))
    for step in traced_model.steps(model):
        if isinstance(step, Merge | Unmerge):  # the dense stream is never merged
            for pair in pairs:
                pair.advance(step)
            continue
        dense_step = next(before)
        for pair in pairs:
            pair.dense = dense_step(pair.dense, pair.weights_BN)
        if step.name in fitted:
            fit(step, step.name, pairs)
        for pair in pairs:
            pair.reduced, pair.beside_BNX = step.passed(pair.reduced, pair.present_BN)


def polish_layers_(subject: Subject, parts: Parts) -> None:
    """Each reduced sublayer, in order, its layers in turn; a step is a sweep over all of them."""
    model, count = subject.model, len(fitted_steps(subject.dense, subject.model))

    def fit(step: SegmentStep, name: str, both: list[Pair]) -> None:
        sweeps = AlternatingFit(segment_sublayer(model, step), both, Newton(), parts.pace(count), subject.ranks)
        if not parts.was_finished_(sweeps.matrices):
            parts.fit_(name, sweeps, of=count)

    pairs = pairs_of(subject.dense, subject.inputs.fitted, subject.inputs.held_out)
    walk_layers(subject.dense, model, pairs, fit)
