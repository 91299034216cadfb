"""An MLP of linear layers, whatever a library spells it as."""

from torch import Tensor, nn


class PointwiseMlp(nn.Module):
    """fc2(act(fc1(x))), channels last."""

    def __init__(self, fc1: nn.Linear, act: nn.Module, fc2: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = fc1, act, fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out
