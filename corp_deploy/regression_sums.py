"""Sums over tokens for a linear regression with several outputs. PURE; float64 sums, so that they add up.

Legend: B images, N tokens, K inputs, O outputs.
"""

from typing import Self

import torch
from torch import Tensor, nn

from .refit import Regression


class RegressionSums:
    """Sums of inputs x and targets t over the tokens of some images; products in the type of x, one image at a time."""

    def __init__(self, *, inputs: int, outputs: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.tokens = 0
        self.x_K, self.xx_KK = zeros(inputs), zeros(inputs, inputs)
        self.t_O, self.tx_OK = zeros(outputs), zeros(outputs, inputs)
        self.tt = 0.0

    @classmethod
    def for_layer(cls, layer: nn.Linear) -> Self:
        """Empty sums for a layer's inputs and what its outputs lack, where the layer is."""
        return cls(inputs=layer.in_features, outputs=layer.out_features, device=layer.weight.device)

    def add(self, x_BNK: Tensor, t_BNO: Tensor) -> None:
        """Count every token of these images once."""
        for x_NK, t_NO in zip(x_BNK, t_BNO, strict=True):
            self.xx_KK.add_(x_NK.T @ x_NK)
            self.tx_OK.add_(t_NO.T @ x_NK)
            self.tokens += x_NK.shape[0]
        self.x_K.add_(x_BNK.double().sum(dim=(0, 1)))
        self.t_O.add_(t_BNO.double().sum(dim=(0, 1)))
        self.tt += float(t_BNO.double().square().sum())

    def with_those_of(self, other: "RegressionSums") -> "RegressionSums":
        """The sums over both sets of images."""
        both = RegressionSums(inputs=self.x_K.numel(), outputs=self.t_O.numel(), device=self.x_K.device)
        both.tokens, both.tt = self.tokens + other.tokens, self.tt + other.tt
        both.x_K, both.xx_KK = self.x_K + other.x_K, self.xx_KK + other.xx_KK
        both.t_O, both.tx_OK = self.t_O + other.t_O, self.tx_OK + other.tx_OK
        return both

    def regression(self) -> Regression:
        """The means of what was summed."""
        assert self.tokens > 0, self.tokens
        return Regression(
            mean_K=self.x_K / self.tokens,
            second_KK=self.xx_KK / self.tokens,
            mean_O=self.t_O / self.tokens,
            cross_OK=self.tx_OK / self.tokens,
            target_square=self.tt / self.tokens,
        )
