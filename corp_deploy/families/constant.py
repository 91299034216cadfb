"""What an engine is given of a site of which a constant stays: engines refuse layers without inputs."""

from torch import Tensor, nn


class Constant(nn.Module):
    """A layer's bias, or nothing, whatever enters: [1,..,1,C], with as many axes as that has, to be added to it."""

    value_C: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        bias = layer.bias
        self.register_buffer("value_C", layer.weight.new_zeros(layer.out_features) if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.value_C.view(*[1] * (x.ndim - 1), -1)
