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


class ContinuousBias(nn.Module):
    """A network's answer to each place that one token of a window has as seen from another (Swin V2, arXiv 2111.09883,
    section 3.3): 16 sigmoid(g(x, y)), x and y on a logarithmic scale.
    """

    places_T2: Tensor
    index: Tensor

    def __init__(self, cpb_mlp: nn.Module, places_T2: Tensor, index_NN: Tensor) -> None:
        """`cpb_mlp`: g, of layers [T,2] -> [T,H]."""
        super().__init__()
        self.cpb_mlp = cpb_mlp
        self.tokens = len(index_NN)
        self.register_buffer("places_T2", places_T2, persistent=False)
        self.register_buffer("index", index_NN.flatten(), persistent=False)

    @property
    def macs(self) -> int:
        """Multiply-adds of the network, whatever the number of inputs."""
        layers = (layer for layer in self.cpb_mlp.modules() if isinstance(layer, nn.Linear))
        return len(self.places_T2) * sum(layer.weight.numel() for layer in layers)

    def forward(self) -> Tensor:
        """[1,H,N,N]."""
        of_places_TH = self.cpb_mlp(self.places_T2).index_select(0, self.index)
        bias_NNH = 16.0 * of_places_TH.view(self.tokens, self.tokens, -1).sigmoid()
        bias_1HNN: Tensor = bias_NNH.permute(2, 0, 1).unsqueeze(0)
        return bias_1HNN


def macs_of(position_bias: nn.Module | None) -> int:
    """What a bias costs beside the attention."""
    return position_bias.macs if isinstance(position_bias, ContinuousBias) else 0


class FixedBias(nn.Module):
    """The same as one constant: an engine that has to compute it loses its fused attention from four heads on."""

    bias_1HNN: Tensor

    def __init__(self, bias_1HNN: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias_1HNN", bias_1HNN.detach().contiguous())

    def forward(self) -> Tensor:
        return self.bias_1HNN
