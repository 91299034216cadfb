"""Global response norm (ConvNeXt V2, arXiv 2301.00808, section 3), whose mean over the channels is a layer of its own.

Each channel is scaled by its norm over the image, divided by the mean of all channels' norms. Where channels are left
out, that mean is no longer theirs alone: it is estimated of the norms of those that stay.

Legend: B inputs, N tokens, F channels, K kept.
"""

import torch
from torch import Tensor, nn


class NormsMean(nn.Linear):
    """A weighted mean of all channels' norms [B,1,F] -> [B,1,1], at first of equal weights; they are no parameters."""

    def __init__(self, channels: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(max(channels, 1), 1, bias=False, device=device, dtype=dtype)
        self.in_features = channels
        del self.weight
        weight_1F = torch.full((1, channels), 1.0 / max(channels, 1), device=device, dtype=dtype)
        self.register_buffer("weight", weight_1F)


class ResponseNorm(nn.Module):
    """x + bias + weight * x * (norms / (mean(norms) + eps)) of [B,...,F], what lies between being an image's tokens;
    `mean` is a layer of its own.
    """

    def __init__(self, channels: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.mean = NormsMean(channels, device=device, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_BNF = x.flatten(1, -2)
        # Half precision can't hold the squares of a map.
        norms_B1F = torch.linalg.vector_norm(x_BNF, dim=1, keepdim=True, dtype=torch.float32).to(x.dtype)
        shares_B1F = norms_B1F / (self.mean(norms_B1F) + self.eps)
        out: Tensor = (x_BNF + (self.bias + self.weight * (x_BNF * shares_B1F))).view_as(x)
        return out

    @property
    def channels(self) -> int:
        return len(self.weight)

    def empty(self, channels: int) -> "ResponseNorm":
        """At another width, its weights not yet set."""
        return ResponseNorm(channels, self.eps, device=self.weight.device, dtype=self.weight.dtype)

    @torch.no_grad()
    def narrowed(self, kept_K: Tensor, mean_1K: Tensor) -> "ResponseNorm":
        """Of these channels, the mean of all told by these weights of their norms."""
        new = self.empty(len(kept_K))
        new.weight.copy_(self.weight[kept_K])
        new.bias.copy_(self.bias[kept_K])
        new.mean.weight.copy_(mean_1K)
        return new.requires_grad_(self.weight.requires_grad)


def mean_state(norm: ResponseNorm) -> dict[str, Tensor]:
    """The weights of the mean as they are, which timm's own don't hold."""
    return {"mean.weight": norm.mean.weight.detach()}
