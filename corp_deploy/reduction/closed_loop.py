"""Closed loops of traced models: site by site in program order, each on the model as reduced so far.

The symmetric loop (GRAIL, section 3.2) keeps the dense weights as its target. The asymmetric one fits layers that write
a site to their dense outputs. Layers that read it are fitted to the dense stream if their output is added to a stream,
else to their dense outputs (asymmetric calibration, arXiv 2504.02692).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from calib.inputs import InputSet
from calib.moments import Moments
from calib.sites import evaluating
from corp_deploy.families.traced_model import token_weights, tracing
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.finding.cuts import input_free_nodes
from corp_deploy.traced.models.module import Tracing, device_of
from corp_deploy.traced.models.narrowed_model import narrow_model, prove_kept
from corp_deploy.traced.models.offered import sites_by_name, traced_sites
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Site
from corp_deploy.traced.models.values import TracedValues
from corp_deploy.traced.programs.folding import is_mean_weight
from corp_deploy.traced.programs.readers import CalledLayer, layers
from ground.errors import BadInput

from .change import TracedReduced, changed_tensors, groups_left
from .correct import GroupedWeights, correct_layer_, weights_by_group
from .coverage import coverage
from .folded_site import fold_site, merges_units
from .kinds import kind_of
from .layer_sums import LayerSums, SplitStatistics, combine_halves, sum_heads, sum_layers
from .layer_targets import Target, find_target
from .loop import Loop
from .method import RESCALED, Method
from .model import Reduction, notes_on, uniform_widths
from .order import Step, irreducible_sites, plan_steps, refuse_shared_readers
from .read_tokens import counts_all, find_read_places
from .report import LoopFit, SiteReport, as_allocated
from .rescaling import RESCALING_NOTE, require_rescalable, rescale_
from .stream_walk import Piece, Segment, Student, read_pieces, split_segments

Done = Callable[[int, int], None] | None


@torch.no_grad()
def reduce_traced(
    model: nn.Module,
    images: InputSet,
    method: Method,
    *,
    widths: Widths | None = None,
    loop: Loop | None = None,
    metrics: Mapping[str, Tensor] | None = None,
    on_progress: Done = None,
) -> Reduction:
    """Return a model with the widths asked for: by the asymmetric loop with settings `loop`, or by the symmetric one.

    Other arguments are as in `reduce`; `metrics`: see Moments. Fitting a layer takes a run of both models between the
    two cuts around it.

    Raises:
        BadInput: too few images, or an option that has no meaning for a traced model.
    """
    if method.rescales and loop is not None:
        raise BadInput(RESCALED)
    if method.rescales:
        require_rescalable(model, images)
    dense = tracing(model)
    sites = traced_sites(dense)
    all_widths = uniform_widths(model, method) if widths is None else dict(widths)
    irreducible = irreducible_sites(dense, sites, all_widths, method)
    target_widths = {name: width for name, width in all_widths.items() if name not in irreducible}
    refuse_shared_readers(dense, sites, target_widths)
    student = Student.of(dense)
    where, weights, half_ids = device_of(model), partial(token_weights, model), _half_ids(images, loop)
    every = None if loop is None else loop.held_out_every
    pieces = read_pieces(images, where, weights=weights, half_ids=half_ids, held_out_every=every)
    read = {} if loop is None or counts_all(model, loop.reads) else find_read_places(dense, where)
    state = _ClosedLoop(
        student=student,
        method=method,
        widths=target_widths,
        loop=loop,
        metrics=metrics or {},
        pieces=list(pieces),
        read=read,
        both_ways=half_ids is not None,
    )
    with evaluating(model):
        for segment in split_segments(dense, student):
            state.run_(segment, on_progress)
    if method.rescales:
        rescale_(dense, student, images)
    way = "each to its dense weights" if loop is None else "fitted to the dense model's streams and layers"
    partly_read = [layer.name for layer in layers(dense.program) if layer.node in read]
    kept_notes = tuple(f"{name} kept as it is: {reason}" for name, reason in irreducible.items())
    return Reduction(
        model=state.narrowed(model, dense),
        method=method,
        sites=tuple(state.reports if widths is None else as_allocated(state.reports)),
        coverage=coverage(sites, method, target_widths, by_site=widths is not None),
        notes=(*notes_on(sites, method, target_widths), *kept_notes),
        decisions=(
            f"closed loop over {len(state.new)} sites in the order in which they run, {way}",
            *((f"only places that outputs read count in the fits of {', '.join(partly_read)}",) if partly_read else ()),
            *((RESCALING_NOTE,) if method.rescales else ()),
        ),
    )


def _half_ids(images: InputSet, loop: Loop | None) -> Tensor | None:
    """Return the loop's `half_ids` if each half has some of the images, else None."""
    if loop is None or loop.half_ids is None:
        return None
    inside_B = torch.isin(images.ids, loop.half_ids)
    return loop.half_ids if bool(inside_B.any()) and not bool(inside_B.all()) else None


@dataclass(slots=True, kw_only=True)
class _ClosedLoop:
    """The state of a closed loop on its way through the program.

    `read`: by layer the mask of output positions that the model's outputs depend on; layers without other positions
    are missing. `both_ways`: held-out pieces are one half of the images, so fits to either half are judged on the
    other.
    """

    student: Student
    method: Method
    widths: Widths
    loop: Loop | None
    metrics: Mapping[str, Tensor]
    pieces: list[Piece]
    read: Mapping[fx.Node, Tensor]
    both_ways: bool
    new: dict[str, TracedReduced] = field(default_factory=dict)
    reports: list[SiteReport] = field(default_factory=list)
    finished: set[fx.Node] = field(default_factory=set)
    called: dict[str, list[CalledLayer]] = field(default_factory=dict)
    steps: list[Step] = field(init=False)
    constants: set[fx.Node] = field(init=False)
    order: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        program = self.student.program
        for layer in layers(program, in_groups=True):
            self.called.setdefault(layer.weight, []).append(layer)
        # A mean used as a divisor must stay far from zero: it is computed from kept groups and never fitted.
        means = (every for weight, every in self.called.items() if is_mean_weight(weight))
        self.finished |= {layer.node for every in means for layer in every}
        self.constants = input_free_nodes(program)
        self.order = {node.name: place for place, node in enumerate(program.nodes)}
        self.steps = plan_steps(self.student.tracing, traced_sites(self.student.tracing), self.widths, self.method)

    def run_(self, segment: Segment, on_progress: Done) -> None:
        """Reduce the sites of a segment and advance the streams behind it."""
        end = float("inf") if segment.after is None else self.order[segment.after.name]
        while self.steps and self.steps[0].place <= end:
            step = self.steps.pop(0)
            later = {layer.node for other in self.steps for layer in self._readers(other.site)}
            self._reduce(segment, step, later)
            if on_progress is not None:
                on_progress(len(self.new), len(self.new) + len(self.steps))
        segment.advance_(self.pieces, with_dense=self.loop is not None)

    def _readers(self, site: Site) -> list[CalledLayer]:
        """Return the layers that are fitted behind a site, in program order."""
        if isinstance(site, TracedPairs):
            return [layer for every in self.called.values() for layer in every if layer.node.name == site.behind]
        every = [layer for each in site.readings for layer in self.called[each.weight]]
        return sorted(dict.fromkeys(every), key=lambda layer: self.order[layer.node.name])

    def _reduce(self, segment: Segment, step: Step, later: set[fx.Node]) -> None:
        """Reduce the site of a step; layers in `later` are fitted with further sites."""
        loop, site, readers = self.loop, step.site, self._readers(step.site)
        alignment = self._align(segment, (site, *step.beside)) if loop is not None and loop.align_inputs else None
        targets: dict[CalledLayer, Target | None] = dict.fromkeys(readers)
        if loop is not None:
            for layer in readers:
                targets[layer] = replace(find_target(layer.node, self.constants), read_P=self._read(segment, layer))
        sums = {} if isinstance(site, TracedPairs) else sum_layers(segment, self.pieces, targets)
        before = {layer: weights_by_group(self.student.program, layer) for layer in readers}
        new = self._reduced(segment, step, sums)
        self.student.set_(changed_tensors({site.name: new}))
        # Whole heads were removed before; now dimensions of those left are.
        self.new[site.name] = replace(new, beside=self.new[site.name].beside) if site.name in self.new else new
        keys = sites_by_name(self.student.tracing)
        self.student.keep_({keys[name].key: groups for name, groups in groups_left(self.new).items()})
        fits = []
        for layer in readers if loop is not None else ():
            if layer.node in later or is_mean_weight(layer.weight):
                continue
            if not sums or len(readers) > 1 or new.mapped:  # its input has changed since the sums were taken
                fits.append(self._fit(layer, sum_layers(segment, self.pieces, {layer: targets[layer]})[layer]))
            else:
                fits.append(self._fit(layer, sums[layer], before[layer]))
            self.finished.add(layer.node)
        first, *rest = new.reports
        reports = [replace(first, alignment=alignment), *rest]
        self.reports += [*reports[:-1], replace(reports[-1], loop=fits[0] if fits else None)]

    def _read(self, segment: Segment, layer: CalledLayer) -> Tensor | None:
        return segment.read_of(layer.node, self.read.get(layer.node))

    def _reduced(self, segment: Segment, step: Step, sums: Mapping[CalledLayer, LayerSums]) -> TracedReduced:
        site, where = step.site, self.student.where
        if isinstance(site, TracedValues) and site.name in self.new:
            site = site.of_heads(self.new[site.name].kept_K)
        kind = kind_of(site)
        if isinstance(site, TracedPairs):
            splits = sum_heads(segment, site, self.pieces, system=self.method.needs_attention_system)
            by_name: dict[str, SplitStatistics] = {site.name: splits}
        else:
            by_name = {layer.name: own.moments() for layer, own in sums.items()}

        def at(moments: Mapping[str, Any]) -> Any:
            return kind.moments_at(site, Moments(sites=moments, lineage={}, images=1, metrics=self.metrics), where)

        whole = at({name: combine_halves(name, halves) for name, halves in by_name.items()})
        if not merges_units(site, step.method):
            apart = None
            if self.both_ways:
                apart = tuple(at({name: halves[half] for name, halves in by_name.items()}) for half in (0, 1))
            return kind.reduced(site, whole, step.method, step.width, splits=apart)
        # Merged units are fitted and judged on the student's stream.
        assert self.student.fewer is None, site.name
        fold = fold_site(site, whole, step.method, step.width)
        nodes = segment.up_to(fold.units.region.around)
        for piece in self.pieces:
            values = segment.run_student(piece, nodes)
            fold.show(values, piece.weights_BN, is_held_out=False, masks=self.student.masks)
        return fold.reduced(self.method, None)

    def _align(self, segment: Segment, sites: Sequence[Site]) -> LoopFit | None:
        """Fit the layers that write the sites to their dense outputs; return the first fit, None without one."""
        spans = (span for site in sites for span in site.groups.writers)
        writers = [layer for span in spans for layer in self.called.get(span.name, ())]
        fits = []
        for layer in sorted(dict.fromkeys(writers), key=lambda each: self.order[each.node.name]):
            if self.student.is_changed and layer.node not in self.finished and len(self.called[layer.weight]) == 1:
                target = Target(layer=layer.node, read_P=self._read(segment, layer))
                fits.append(self._fit(layer, sum_layers(segment, self.pieces, {layer: target})[layer]))
            # If the layer writes a further site, another fit to its dense output would undo the rows changed here.
            self.finished.add(layer.node)
        return fits[0] if fits else None

    def _fit(self, layer: CalledLayer, sums: LayerSums, was: GroupedWeights | None = None) -> LoopFit:
        assert self.loop is not None, layer
        return correct_layer_(self.student, layer, sums, self.loop.strengths, was, both_ways=self.both_ways)

    def narrowed(self, model: nn.Module, dense: Tracing) -> nn.Module:
        """Return the narrowed model; raise BadInput for a site that can't be narrowed as planned."""
        narrower = {name: new for name, new in self.new.items() if new.is_narrower}
        kept, unreduced = prove_kept(model, groups_left(narrower))
        if unreduced:
            name, reason = next(iter(unreduced.items()))
            raise BadInput(f"closed loop: {name} can't be narrowed, {reason}; reduce without --closed-loop")
        dtype = next(model.parameters()).dtype
        changed = self.student.changed(dense.program)
        return narrow_model(model, kept, {name: tensor.to(dtype) for name, tensor in changed.items()})
