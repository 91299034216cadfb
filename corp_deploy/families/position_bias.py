"""What attention adds to scores by where the tokens are.

Legend: H heads, N tokens, T places that one token can have as seen from another.
"""

from torch import Tensor, nn


class TableBias(nn.Module):
    """A learned entry for each place that one token has as seen from another."""

    index: Tensor

    def __init__(self, table_TH: Tensor, index_NN: Tensor) -> None:
        """`index_NN`: the place of each token as seen from each other."""
        super().__init__()
        self.table = nn.Parameter(table_TH.detach().clone())
        self.tokens = len(index_NN)
        self.register_buffer("index", index_NN.flatten(), persistent=False)

    def forward(self) -> Tensor:
        """[1,H,N,N]."""
        bias_NNH = self.table.index_select(0, self.index).view(self.tokens, self.tokens, -1)
        return bias_NNH.permute(2, 0, 1).unsqueeze(0)


class FixedBias(nn.Module):
    """The same as one constant: an engine that has to compute it loses its fused attention from four heads on."""

    bias_1HNN: Tensor

    def __init__(self, bias_1HNN: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias_1HNN", bias_1HNN.detach().contiguous())

    def forward(self) -> Tensor:
        return self.bias_1HNN
