"""How near a model that merges tokens is to merging others: the margins of its choices, input by input.

A choice is settled by comparing similarities. Two runtimes that round differently make the same choices where every
margin is larger than what they can differ by, and may make others where one is smaller.

Legend: B inputs, N tokens, A and D the unprotected at even and at odd places, R tokens merged, X dimensions compared.
"""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from calib.inputs import Inputs, batch_size, run_model
from corp_deploy.traced.models.token_merging import TokenMerge, alike, merges_in

from . import traced_model


def _gap_B(falling_BA: Tensor, count: int) -> Tensor:
    """From the last that is taken to the first that is not; infinite where all are taken."""
    if count >= falling_BA.shape[1]:
        return torch.full(falling_BA.shape[:1], torch.inf, device=falling_BA.device)
    return falling_BA[:, count - 1] - falling_BA[:, count]


def _of_merge(merge: TokenMerge, x_BNC: Tensor, compared: Tensor, sizes_BN: Tensor | None) -> Tensor:
    """The lesser of the gap between the tokens that are merged and those kept, and, of each that is merged, the gap
    from its best match to the second best; as shares of the tokens' spread, or of cosines.
    """
    count, alike_BAD = merge.count, alike(merge.metric, x_BNC, compared, sizes_BN, merge.protected)
    if merge.metric in ("ward", "attended"):
        # The mean squared norm of the unprotected tokens about their mean, which distances and their rounding are of.
        free_BNC = x_BNC[:, merge.protected :].float()
        spread_B = (free_BNC - free_BNC.mean(dim=1, keepdim=True)).square().sum(dim=-1).mean(dim=1).clamp(min=1e-30)
        alike_BAD = alike_BAD / spread_B[:, None, None]
    if merge.metric == "attended":
        alike_BAD = alike_BAD / (2.0 * compared.float().sqrt().mean(dim=1)[:, None, None])
    falling_BA, order_BA = alike_BAD.amax(dim=-1).sort(dim=1, descending=True, stable=True)
    gap_B = _gap_B(falling_BA, count)
    if alike_BAD.shape[2] < 2:
        return gap_B
    two_BA2 = alike_BAD.topk(2, dim=-1).values
    matches_BR = (two_BA2[..., 0] - two_BA2[..., 1]).gather(1, order_BA[:, :count])
    return torch.minimum(gap_B, matches_BR.amin(dim=1))


def margins_of(merge: TokenMerge, x_BNC: Tensor, compared: Tensor, sizes_BN: Tensor | None) -> Tensor:
    """The least margin of one merge's choices, of a stream of tokens of these sizes: [B]."""
    if merge.how != "drop":
        return _of_merge(merge, x_BNC, compared, sizes_BN)
    # The gap between the tokens dropped and those kept, as a share of the attention there.
    rising_BN = compared[:, merge.protected :].float().sort(dim=1).values
    return -_gap_B(rising_BN, merge.count) / rising_BN[:, merge.count - 1].clamp(min=1e-30)


def merge_margins(model: nn.Module, inputs: Inputs) -> Tensor | None:
    """The least margin of any choice on the way through the model, for each input [B]; None where nothing is merged."""
    if traced_model.merging_of(model) is None:
        return None
    every = list[Tensor]()

    def look(merge: nn.Module, entering: tuple[Tensor, Tensor | None, Tensor | None, Tensor]) -> None:
        assert isinstance(merge, TokenMerge), merge
        every.append(margins_of(merge, entering[0], entering[3], entering[1]))

    with ExitStack() as stack, torch.inference_mode():
        for merge in merges_in(model).values():
            stack.callback(merge.register_forward_pre_hook(look).remove)
        run_model(model, inputs)
        if not every:
            return torch.full((batch_size(inputs),), torch.inf)
    return torch.stack(every).amin(dim=0)
