"""What an engine is given of a site of which a constant stays: engines refuse layers without inputs."""

from torch import Tensor, nn


class Constant(nn.Module):
    """A layer's bias [C], or nothing, whatever enters; it is added to a stream [B,N,C]."""

    value_C: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        bias = layer.bias
        self.register_buffer("value_C", layer.weight.new_zeros(layer.out_features) if bias is None else bias.detach())

    def forward(self, _: Tensor) -> Tensor:
        return self.value_C
