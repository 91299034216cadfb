"""A traced model and its student, the model that is being reduced, run side by side from cut to cut.

The student keeps its dense sizes on the way: removed channels are set to 0 wherever the program sums over them, as in
traced/narrowing/proof.py, and weights change in place in the student's own copies.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, InputSet, tensors_by_name, to_device
from corp_deploy.traced.finding.choice import Kept, removed_labels
from corp_deploy.traced.finding.cuts import find_cuts, required_nodes, side_inputs
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.merged_program import MergedProgram
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.narrowing.proof import Mask, removal_masks, zero_removed
from corp_deploy.traced.programs.program import Program, find_reachable, number_at_one, operation
from corp_deploy.traced.programs.readers import every_layer, replace_tensors
from corp_deploy.traced.programs.sizes import changes_in_place
from ground.errors import BadInput

from .streams import mean_of_sources

Values = dict[fx.Node, Any]
_BATCH_SIZE = 16


def run_on_batch(
    program: Program,
    nodes: Sequence[fx.Node],
    entering: Mapping[fx.Node, Tensor],
    *,
    masks: Mapping[fx.Node, Sequence[Mask]] | None = None,
) -> Values:
    """Run these nodes on a batch and return all values; `masks` tell by node which elements of its inputs to zero."""
    values: Values = dict(entering)
    batch = len(next(iter(entering.values())))
    for node in nodes:
        if node in entering:
            continue
        if node.op == "get_attr":
            values[node] = program.tensor(str(node.target))
        elif operation(node) == "sym_size" and node.args[0] not in values:
            count = number_at_one(node)
            assert count is not None, node
            values[node] = batch * count
        else:
            here = values if masks is None or node not in masks else values | _apply_masks(values, masks[node])
            module = program.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
            values[node] = call_node(node, here, module)
    return values


def call_node(node: fx.Node, values: Values, module: nn.Module | None = None) -> Any:
    """Return a node's output, by `module` if the node calls one; an in-place operation changes a copy."""
    entering: Any = fx.map_arg((node.args, node.kwargs), lambda each: values[each])
    args, kwargs = entering
    if module is not None:
        return module(*args, **kwargs)
    assert callable(node.target), node
    if changes_in_place(node):
        args = (args[0].clone(), *args[1:])
    return node.target(*args, **kwargs)


def _apply_masks(values: Values, masks: Sequence[Mask]) -> Values:
    masked: Values = {}
    for source, axes, keep in masks:
        masked[source] = zero_removed((values | masked)[source], axes, keep)
    return masked


def _nodes_between(program: Program, entering: Collection[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that have to run to compute `ends` from the values of `entering`, in program order.

    A size is known without the node that it is of.
    """

    def inputs_of(node: fx.Node) -> list[fx.Node]:
        return [] if node in entering or operation(node) == "sym_size" else node.all_input_nodes

    found = find_reachable(ends, inputs_of)
    return [node for node in program.nodes if node in found]


@dataclass(slots=True, kw_only=True)
class Piece:
    """The values of a few inputs at a cut, in the dense program and in the student.

    Pieces that are `held_out` choose the strength of fits to the others. `weights_BN`: 0 for tokens that are padding,
    None if there are none. `merged`: sizes and source indices of the student's merged tokens, by the nodes that
    computed them. `ahead`: the dense program's value at the next cut, if a run has reached it.
    """

    dense: tuple[Tensor, ...]
    student: tuple[Tensor, ...]
    held_out: bool
    weights_BN: Tensor | None = None
    merged: Mapping[fx.Node, Tensor] = field(default_factory=dict)
    ahead: Tensor | None = None


def read_pieces(
    inputs: InputSet,
    where: torch.device,
    *,
    weights: Callable[[Inputs], Tensor | None] = lambda _: None,
    half_ids: Tensor | None = None,
    held_out_every: int | None = None,
) -> Iterator[Piece]:
    """Yield all inputs in pieces; inputs with `half_ids`, or each `held_out_every`-th one, are held out.

    Raises:
        BadInput: there are too few inputs.
    """
    start, every = 0, held_out_every or inputs.count + 1
    for batch in inputs.read(_BATCH_SIZE):
        if not len(batch.ids):
            continue
        here = to_device(batch.inputs, where)
        tensors, weights_BN = tuple(tensors_by_name(here).values()), weights(here)
        places_B = torch.arange(start, start + len(tensors[0]))
        held_B = places_B % every == every - 1
        if half_ids is not None:
            held_B = torch.isin(batch.ids, half_ids)
        start += len(places_B)
        for is_held, chosen_B in ((False, ~held_B), (True, held_B)):
            if bool(chosen_B.any()):
                own = tuple(each[chosen_B.to(where)] for each in tensors)
                of_tokens = None if weights_BN is None else weights_BN[chosen_B.to(where)]
                yield Piece(dense=own, student=own, held_out=is_held, weights_BN=of_tokens)
    if held_out_every is not None and start < held_out_every:
        raise BadInput(
            f"closed loop: got {start} images, expected at least {held_out_every}, "
            "because one in so many is held out to choose how far to trust the fit"
        )


@dataclass(slots=True, kw_only=True)
class Student:
    """The model that is being reduced.

    `tracing`: the dense program with copies of its layers' weights and biases, whose names are `owned`. `gone`: the
    mask over all labels of channel groups, true for those removed so far. `fewer`: the program with merged tokens.
    """

    tracing: Tracing
    fewer: MergedProgram | None
    owned: frozenset[str]
    gone: Tensor
    is_changed: bool = False
    masks: Mapping[fx.Node, Sequence[Mask]] = field(default_factory=dict)

    @classmethod
    def of(cls, dense: Tracing) -> Self:
        """Return a student equal to the dense model."""
        owned = frozenset(name for layer in every_layer(dense.program) for name in (layer.weight, layer.bias))
        program = replace_tensors(dense.program, {name: dense.program.tensor(name).detach().clone() for name in owned})
        tracing = replace(dense, program=program)
        vars(tracing).update(found=replace(dense.analysis, program=program), shares=dense.shares)
        gone, found, fewer = torch.zeros(dense.analysis.flow.groups.count, dtype=torch.bool), dense.mergeable, None
        if dense.merging is not None:
            assert isinstance(found, Mergeable), found
            fewer = found.merged(program, dense.merging, follows=True)
        return cls(tracing=tracing, owned=owned, gone=gone, fewer=fewer)

    @property
    def program(self) -> Program:
        return self.tracing.program

    @property
    def where(self) -> torch.device:
        return next(self.program.tensor(name).device for name in self.owned)

    def set_(self, tensors: Mapping[str, Tensor]) -> None:
        foreign = sorted(set(tensors) - self.owned)
        assert not foreign, foreign
        for name, tensor in tensors.items():
            self.program.tensor(name).copy_(tensor)
        self.is_changed = True

    def keep_(self, kept: Kept) -> None:
        """Mark all groups of these sites except the kept ones as removed: runs set their channels to 0."""
        found = self.tracing.analysis
        self.gone |= removed_labels(found, kept)
        self.is_changed = True
        self.masks = removal_masks(found, self.gone)

    def changed(self, dense: Program) -> dict[str, Tensor]:
        """Return the tensors that differ from the dense ones."""
        tensors = {name: self.program.tensor(name) for name in sorted(self.owned)}
        return {name: tensor for name, tensor in tensors.items() if not torch.equal(tensor, dense.tensor(name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The program between two cuts; None stands for its start or end. `beside`: inputs that every segment gets."""

    dense: Tracing
    student: Student
    before: fx.Node | None
    after: fx.Node | None
    beside: tuple[fx.Node, ...]

    def up_to(self, ends: Collection[fx.Node]) -> list[fx.Node]:
        """Return the nodes between the cut `before` and these ends, in program order."""
        return required_nodes(self.dense.program, self.before, ends)

    def _entering(self, tensors: tuple[Tensor, ...]) -> dict[fx.Node, Tensor]:
        nodes = self.dense.program.inputs if self.before is None else (self.before, *self.beside)
        return dict(zip(nodes, tensors, strict=True))

    def run_dense(self, piece: Piece, nodes: Sequence[fx.Node]) -> Values:
        values = run_on_batch(self.dense.program, nodes, self._entering(piece.dense))
        if self.after in values:
            piece.ahead = values[self.after]
        return values

    def run_student(self, piece: Piece, nodes: Sequence[fx.Node]) -> Values:
        """Run the student and return the nodes' values; with merged tokens, sizes and sources of the tokens too."""
        student, fewer = self.student, self.student.fewer
        entering = self._entering(piece.student)
        if fewer is None:
            return run_on_batch(student.program, nodes, entering, masks=student.masks)
        stands = fewer.stands
        here = {stands[node.name]: each for node, each in entering.items()} | dict(piece.merged)
        ends = [stands[node.name] for node in nodes]
        ends += [
            by_name[node.name]
            for node in nodes
            for by_name in (fewer.sizes_at, fewer.sources_at)
            if node.name in by_name
        ]
        masks = {
            stands[node.name]: [(stands[source.name], axes, keep) for source, axes, keep in each]
            for node, each in student.masks.items()
        }
        values = run_on_batch(fewer.program, _nodes_between(fewer.program, here, ends), here, masks=masks)
        return values | {node: values[stands[node.name]] for node in (*nodes, *entering)}

    def weights_at(self, piece: Piece, values: Values, node: fx.Node) -> Tensor | None:
        """Return token weights of a node's output [B,N]: sizes of merged tokens, or 0 for padding; None: all equal."""
        fewer = self.student.fewer
        is_merged = fewer is not None and node.name in fewer.sizes_at
        return values[fewer.sizes_at[node.name]] if fewer is not None and is_merged else piece.weights_BN

    def as_merged(self, dense: Values, student: Values, node: fx.Node, ends: Sequence[fx.Node]) -> Values:
        """Return dense values with those at `ends` averaged over the tokens that the student has merged at `node`."""
        fewer = self.student.fewer
        if fewer is None or node.name not in fewer.sources_at:
            return dense
        sources_BM, count = student[fewer.sources_at[node.name]], student[node].shape[1]
        return dense | {end: mean_of_sources(dense[end], sources_BM, count) for end in ends}

    def read_of(self, node: fx.Node, read_P: Tensor | None) -> Tensor | None:
        """Return the mask of a node's places that the model's outputs read, `read_P` unless tokens are merged there."""
        fewer = self.student.fewer
        if fewer is None or node.name not in fewer.merge_at:
            return read_P
        return fewer.read_of(fewer.stands[node.name], read_P)

    def advance_(self, pieces: Sequence[Piece], *, with_dense: bool) -> None:
        """Move pieces to the cut behind the segment; dense values only `with_dense` or if the student is unchanged."""
        if self.after is None:
            return
        nodes = self.up_to([self.after])
        fewer, name = self.student.fewer, self.after.name
        extra = [] if fewer is None else [each[name] for each in (fewer.sizes_at, fewer.sources_at) if name in each]
        others = slice(1, 1 + len(self.beside))
        for piece in pieces:
            values = self.run_student(piece, nodes)
            piece.merged = {node: values[node] for node in extra}
            piece.student = (values[self.after], *piece.student[others])
            if not self.student.is_changed and not extra:
                piece.dense = piece.student
            elif with_dense:
                ahead = self.run_dense(piece, nodes)[self.after] if piece.ahead is None else piece.ahead
                piece.dense = (ahead, *piece.dense[others])
            piece.ahead = None


def split_segments(dense: Tracing, student: Student) -> Iterator[Segment]:
    """Yield the segments from the inputs to the outputs, cut by cut."""
    beside = side_inputs(dense.program)
    for before, after in pairwise([None, *(cut.node for cut in find_cuts(dense.analysis, beside_outputs=True)), None]):
        yield Segment(dense=dense, student=student, before=before, after=after, beside=beside)
