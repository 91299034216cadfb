"""Convolutions of a reduced model that give the dense ones' means and variances again: REPAIR (Jordan et al. 2022,
arXiv 2211.08403), which GRAIL calls re-estimating its BatchNorms.

One convolution after the other in the order they run, so that each meets what those in front of it give by then. No
label is looked at and nothing is solved; weights and biases take the scale, so that it costs nothing at run time.

Legend: B images of a piece, N tokens, C channels, O outputs of a convolution.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.input_set import InputSet
from corp_deploy.algebra.patches import rescaled_outputs
from corp_deploy.families.convolution import Convolution
from corp_deploy.families.family import family_of
from corp_deploy.families.modules import replaced
from corp_deploy.families.steps import Merge
from ground.errors import BadInput

from .branch_sums import refuse_nonfinite
from .streams import Streams, embedded

Run = Callable[[Tensor], Tensor]
SAID = "every convolution rescaled to the dense one's means and variances, channel by channel"


class OutputSums:
    """Of what a convolution gives, over all places of all images, in float64."""

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


def convolutions(model: nn.Module) -> dict[str, Convolution]:
    """By their paths in the model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Convolution)}


@contextmanager
def _summing(convs: Mapping[str, Convolution]) -> Iterator[dict[str, OutputSums]]:
    """Within it: the sums of those that have run, in the order they ran first."""
    sums: dict[str, OutputSums] = {}

    def hear(path: str, conv: nn.Module, _: tuple[Tensor, ...], y_BOHW: Tensor) -> None:
        sums.setdefault(path, OutputSums(y_BOHW.shape[1], y_BOHW.device)).add(y_BOHW)

    with ExitStack() as stack:
        for path, conv in convs.items():
            stack.callback(conv.register_forward_hook(partial(hear, path)).remove)
        yield sums


def _runs(model: nn.Module) -> list[Run]:
    """The model's steps, and what stands behind the last one."""
    family = family_of(model)
    steps = list(family.steps(model))
    runs: list[Run] = [step for step in steps if not isinstance(step, Merge)]
    assert len(runs) == len(steps), type(model)
    return [*runs, partial(family.normed, model)]


def _rescale_(conv: Convolution, own: OutputSums, mean_O: Tensor, variance_O: Tensor) -> None:
    """To a mean and variance of each output, where it doesn't have them."""
    if torch.equal(own.mean_O, mean_O) and torch.equal(own.variance_O, variance_O):
        return
    assert conv.bias is not None, conv
    weight_OIHW = conv.weight.double()
    new_OU, bias_O = rescaled_outputs(
        weight_OIHW.flatten(1), conv.bias.double(), own.mean_O, own.variance_O, mean_O, variance_O
    )
    conv.fill_(new_OU.view_as(weight_OIHW), bias_O)


def require_rescalable(model: nn.Module, images: InputSet | None) -> InputSet:
    """The images. Raises BadInput without any, and for a model without such convolutions."""
    if not convolutions(model):
        raise BadInput(f"--rescale: {type(model).__name__} has no rows of convolutions to rescale; leave it away")
    if images is None:
        raise BadInput("--rescale takes means and variances on the calibration images; give them: --images")
    return images


@torch.no_grad()
def rescaled(
    dense: nn.Module, reduced: nn.Module, images: InputSet, *, kept: Mapping[str, Tensor], batch_size: int = 32
) -> nn.Module:
    """A copy of the reduced model whose convolutions give the dense ones' means and variances on these images.

    `kept`: by paths, the dense outputs that stay where not all do. Each convolution takes one run of its step, and the
    dense model one of the whole; the memory is a closed loop's (see Streams).
    """
    own = replaced(reduced, {})
    own_convs = convolutions(own)
    with evaluating(dense):
        both = [Streams(embedded(model, images, batch_size), held_out_every=1) for model in (dense, own)]
        for dense_run, own_run in zip(_runs(dense), _runs(own), strict=True):
            with _summing(convolutions(dense)) as wanted:
                _advance(both[0], dense_run)
            for path, sums in wanted.items():
                stay = kept.get(path, slice(None))
                with _summing({path: own_convs[path]}) as given:
                    for pair in both[1]:
                        own_run(pair.reduced)
                refuse_nonfinite(path, given[path].variance_O)
                _rescale_(own_convs[path], given[path], sums.mean_O[stay], sums.variance_O[stay])
            _advance(both[1], own_run)
    return own.eval().requires_grad_(False)


def _advance(streams: Streams, run: Run) -> None:
    streams.gather()
    for pair in streams:
        pair.dense = pair.reduced = run(pair.reduced)
