"""Convolutions of a reduced model rescaled to the dense ones' means and variances.

This is REPAIR (Jordan et al. 2022, arXiv 2211.08403), which GRAIL calls re-estimating its BatchNorms. Convolutions are
rescaled in program order, each on its input from the convolutions rescaled before. No label is used and nothing is
solved. The scales are multiplied into weights and biases, so that they cost nothing at run time.

Legend: B images of a piece, C channels, O outputs of a convolution, U columns of its weight, X places.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from calib.inputs import InputSet
from corp_deploy.algebra.patches import rescale_outputs
from corp_deploy.families.family import CONVOLUTIONS, kinds_of
from corp_deploy.families.traced_model import tracing
from corp_deploy.traced.finding.site_groups import Index
from corp_deploy.traced.models.module import Tracing, device_of
from corp_deploy.traced.models.offered import sites_by_name
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import CONV2D, CalledLayer, every_layer
from ground.errors import BadInput

from .stream_walk import Piece, Segment, Student, Values, read_pieces, split_segments
from .streams import refuse_nonfinite

RESCALING_NOTE = "every convolution rescaled to the dense one's means and variances, channel by channel"


class OutputSums:
    """Sums of a convolution's outputs, over all places of all images, in float64."""

    def __init__(self, outputs: int, device: torch.device) -> None:
        self._count = 0
        self._sum_O, self._square_O = (torch.zeros(outputs, dtype=torch.float64, device=device) for _ in range(2))

    def add(self, y_BOHW: Tensor) -> None:
        y_OX = y_BOHW.double().transpose(0, 1).flatten(1)
        self._count += y_OX.shape[1]
        self._sum_O += y_OX.sum(dim=1)
        self._square_O += y_OX.square().sum(dim=1)

    @property
    def mean_O(self) -> Tensor:
        return self._sum_O / self._count

    @property
    def variance_O(self) -> Tensor:
        return (self._square_O / self._count - self.mean_O.square()).clamp_min(0.0)


def rescalable_convolutions(program: Program) -> Iterator[CalledLayer]:
    """Return the convolutions that are called once, in program order."""
    every = [layer for layer in every_layer(program) if layer.node.target is CONV2D]
    calls = Counter(name for layer in every for name in (layer.weight, layer.bias))
    return (layer for layer in every if calls[layer.weight] == calls[layer.bias] == 1)


def require_rescalable(model: nn.Module, images: InputSet | None) -> InputSet:
    """Return the images; raise BadInput without any, or without convolutions that can be rescaled."""
    if CONVOLUTIONS not in kinds_of(model) or next(rescalable_convolutions(tracing(model).program), None) is None:
        raise BadInput(f"--rescale: {type(model).__name__} has no convolutions that can be rescaled; leave it out")
    if images is None:
        raise BadInput("--rescale takes means and variances on the calibration images; give them: --images")
    return images


def rescaled_tensors(
    model: nn.Module, kept: Mapping[str, Index], tensors: Mapping[str, Tensor], images: InputSet
) -> dict[str, Tensor]:
    """Return all changed weights and biases, in dense sizes, after convolutions were rescaled.

    `kept` are the groups that stay of each site, `tensors` the weights and biases that the reduction changed before.
    """
    dense = tracing(model)
    student, names = Student.of(dense), sites_by_name(dense)
    student.set_(tensors)
    student.keep_({names[name].key: groups for name, groups in kept.items()})
    rescale_(dense, student, images)
    return student.changed(dense.program)


@torch.no_grad()
def rescale_(dense: Tracing, student: Student, images: InputSet) -> None:
    """Rescale a student's convolutions to the dense model's means and variances on these images.

    The student runs once for each convolution, from the cut in front of it; the dense model runs once in all. Removed
    rows get values too, which have no effect.
    """
    pieces = list(read_pieces(images, device_of(dense.program.graph)))
    left = list(rescalable_convolutions(dense.program))
    for segment in split_segments(dense, student):
        inside = set(segment.up_to([segment.after or dense.program.output]))
        own = [layer for layer in left if layer.node in inside]
        for layer, dense_sums in _sums(segment, own, pieces, segment.run_dense).items():
            sums = _sums(segment, [layer], pieces, segment.run_student)[layer]
            refuse_nonfinite(layer.name, sums.variance_O)
            _rescale_(student, layer, sums, dense_sums)
        segment.advance_(pieces, with_dense=True)


def _sums(
    segment: Segment,
    layers: Sequence[CalledLayer],
    pieces: Sequence[Piece],
    run: Callable[[Piece, list[fx.Node]], Values],
) -> dict[CalledLayer, OutputSums]:
    """Sum the layers' outputs in one model; `run` runs the dense model or the student."""
    weights = {layer: segment.dense.program.tensor(layer.weight) for layer in layers}
    sums = {layer: OutputSums(len(weight), weight.device) for layer, weight in weights.items()}
    nodes = segment.up_to([each.node for each in layers])
    for piece in pieces:
        values = run(piece, nodes)
        for layer, own in sums.items():
            own.add(values[layer.node])
    return sums


def _rescale_(student: Student, layer: CalledLayer, own: OutputSums, dense: OutputSums) -> None:
    """Rescale a layer so that each output has the dense output's mean and variance."""
    found, wanted = ((sums.mean_O, sums.variance_O) for sums in (own, dense))
    if not all(map(torch.equal, found, wanted)):
        weight, bias = (student.program.tensor(name) for name in (layer.weight, layer.bias))
        new_OU, bias_O = rescale_outputs(weight.double().flatten(1), bias.double(), *found, *wanted)
        student.set_({layer.weight: new_OU.view_as(weight), layer.bias: bias_O})
