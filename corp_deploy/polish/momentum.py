"""Steps whose directions have equal singular values, of a size relative to each matrix's own weights.

A gradient of a layer is dominated by the few directions in which its inputs are large; made orthogonal, momentum moves
all directions alike (Muon: Jordan et al. 2024; Bernstein & Newhouse, arXiv 2409.20325). Relative to the weights, one
step size serves layers whose LayerScale differs by 25 times.

Legend: O outputs, K inputs of a layer, the bias as one more column.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .matrices import Matrix

_DECAY = 0.9
# The quintic iteration of Jordan et al. that brings singular values near to 1 in five rounds.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_LEAST = 1e-30


def orthogonal(matrix_OK: Tensor) -> Tensor:
    """The matrix with all its singular values brought to about 1 (0.7 to 1.2)."""
    wide = matrix_OK if matrix_OK.shape[0] <= matrix_OK.shape[1] else matrix_OK.T
    x: Tensor = wide / wide.norm().clamp_min(_LEAST)
    first, third, fifth = _QUINTIC
    for _ in range(_ROUNDS):
        square = x @ x.T
        x = first * x + (third * square + fifth * square @ square) @ x
    return x if wide is matrix_OK else x.T


class Momentum:
    """Mean gradients of matrices over the last steps, which steps are made of."""

    def __init__(self, matrices: Sequence[Matrix], means: Sequence[Tensor]) -> None:
        """`means` are changed in place as steps are made."""
        self.matrices, self.means = tuple(matrices), tuple(means)

    @torch.no_grad()
    def step_(self, size: float) -> None:
        """Change every matrix by `size` times its scale, root mean square, against its gradient with momentum."""
        for matrix, mean_OK in zip(self.matrices, self.means, strict=True):
            gradient_OK = matrix.gradient_OK
            mean_OK.lerp_(gradient_OK, 1.0 - _DECAY)
            direction_OK = orthogonal(gradient_OK.lerp(mean_OK, _DECAY))
            rms = direction_OK.square().mean().sqrt().clamp_min(_LEAST)
            matrix.add_(direction_OK * (-size * matrix.scale / rms))
            for parameter in matrix.parameters:
                parameter.grad = None
