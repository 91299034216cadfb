"""Adam's steps, of a size relative to each matrix's own weights.

Adam as published (Kingma & Ba, arXiv 1412.6980), its step scaled by the root mean square of the matrix it changes, as
Adafactor does (Shazeer & Stern, arXiv 1804.04235, section 8): so one step size serves layers whose weights, and
LayerScale behind them, differ by many times. Norms, LayerScale and embeddings are left alone. What makes no difference,
as the bias of keys, has a gradient of rounding alone, which must not grow to whole steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .matrices import Matrix

_MEAN, _SQUARE = 0.9, 0.99  # the latter short, as a polish is
_LEAST = 1e-12
_NOISE_REL = 1e-4  # of a matrix's root mean square gradient: an entry below it moves less, as rounding's would else


class Adam:
    """Running means of gradients and of their squares, which are changed in place as steps are made."""

    def __init__(self, matrices: Sequence[Matrix], means: Sequence[Tensor], squares: Sequence[Tensor]) -> None:
        self.matrices, self.means, self.squares = tuple(matrices), tuple(means), tuple(squares)

    @torch.no_grad()
    def step_(self, number: int, size: float) -> None:
        """The step of this number, from 1: entries change by about `size` times the scale of their matrix."""
        for matrix, mean_OK, square_OK in zip(self.matrices, self.means, self.squares, strict=True):
            gradient_OK = matrix.gradient_OK
            mean_OK.lerp_(gradient_OK, 1.0 - _MEAN)
            square_OK.lerp_(gradient_OK.square(), 1.0 - _SQUARE)
            root_OK = (square_OK / (1.0 - _SQUARE**number)).sqrt()
            root_OK.add_(_NOISE_REL * root_OK.square().mean().sqrt() + _LEAST)
            matrix.add_(mean_OK / root_OK * (-size * matrix.scale / (1.0 - _MEAN**number)))
            for parameter in matrix.parameters:
                parameter.grad = None
