"""Heads that talk to each other (arXiv 2003.02436): scores are mixed over the heads before the softmax and behind it.

Legend: B inputs, H heads, N tokens.
"""

from torch import Tensor, nn


def _mixed(layer: nn.Linear, x_BHNN: Tensor) -> Tensor:
    out_BNNH: Tensor = layer(x_BHNN.permute(0, 2, 3, 1))
    return out_BNNH.permute(0, 3, 1, 2)


class TalkingHeads(nn.Module):
    """Two layers over the heads."""

    def __init__(self, before: nn.Linear, behind: nn.Linear) -> None:
        super().__init__()
        self.before, self.behind = before, behind

    def scores(self, scores_BHNN: Tensor) -> Tensor:
        """What the softmax takes."""
        return _mixed(self.before, scores_BHNN)

    def shares(self, shares_BHNN: Tensor) -> Tensor:
        """What values are weighted by."""
        return _mixed(self.behind, shares_BHNN)
