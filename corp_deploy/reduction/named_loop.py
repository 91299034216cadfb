"""Closed loops along the cuts of a traced program."""

from collections.abc import Callable

from torch import nn

from calib.input_set import InputSet
from corp_deploy.families.widths import Widths

from .loop import Loop
from .method import Method
from .model import Reduction
from .traced_loop import reduce_traced

Done = Callable[[int, int], None] | None


def reduce_by_closed_loop(
    model: nn.Module,
    images: InputSet,
    method: Method,
    *,
    widths: Widths | None = None,
    loop: Loop | None = None,
    on_progress: Done = None,
) -> Reduction:
    """Sites in the order they run, each fitted to the dense model's stream (asymmetric calibration)."""
    return reduce_traced(model, images, method, widths=widths, loop=loop or Loop(), on_progress=on_progress)


def reduce_by_symmetric_loop(
    model: nn.Module, images: InputSet, method: Method, *, widths: Widths | None = None, on_progress: Done = None
) -> Reduction:
    """Sites in the order they run, each by the statistics of the model as reduced so far."""
    return reduce_traced(model, images, method, widths=widths, on_progress=on_progress)
