"""The residual streams of the dense and of the reduced model, carried side by side through the blocks.

Legend: B images of a piece, N tokens, M source tokens where some are merged, C channels, X dimensions compared.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from calib.inputs import Inputs, InputSet, to_device
from corp_deploy.families import traced_model
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.steps import Merge, SegmentStep, Step, Unmerge
from corp_deploy.traced.models.token_merging import Tokens
from ground.errors import BadInput

HELD_OUT_EVERY = 4
CPU_TOKENS = 2048  # of a piece: its activations stay in a CPU's caches, and products over it are long enough
Embedded = tuple[Tensor, Tensor | None]
"""The residual stream [B,N,C] of some inputs, and which of its tokens are there [B,N]: 1, or 0 for padding."""


@dataclass(slots=True, kw_only=True)
class Pair:
    """Both streams [B,N,C] of a few inputs; those `held_out` choose how far to trust a fit to the others.

    `weights_BN` tell which tokens are there, None for all. Where tokens are merged the reduced stream has fewer:
    `sizes_BN` dense tokens stand in each, the dense token m in number `sources_BM` of them.
    """

    dense: Tensor
    reduced: Tensor
    held_out: bool
    weights_BN: Tensor | None = None
    sizes_BN: Tensor | None = None
    sources_BM: Tensor | None = None
    beside_BNX: Tensor | None = None

    @property
    def present_BN(self) -> Tensor | None:
        """How much each token of the reduced stream counts, None for all alike."""
        return self.weights_BN if self.sizes_BN is None else self.sizes_BN

    @property
    def target(self) -> Tensor:
        """What the reduced stream should be: each token the mean of the dense ones that stand in it."""
        if self.sources_BM is None:
            return self.dense
        return mean_of_sources(self.dense, self.sources_BM, self.reduced.shape[1])

    def advance(self, step: Step) -> None:
        """Both through the same step; once, as long as they are one. The dense stream is never merged."""
        if isinstance(step, Merge | Unmerge):
            tokens = Tokens(self.reduced, self.present_BN, self.sources_BM)
            tokens = step(tokens) if isinstance(step, Unmerge) else step(tokens, self.beside_BNX)
            self.reduced, self.sizes_BN, self.sources_BM = tokens
            self.beside_BNX = None
            return
        same = self.reduced is self.dense
        reduced, beside = self._behind(step, self.reduced, self.present_BN)
        self.dense = reduced if same else self._behind(step, self.dense, self.weights_BN)[0]
        self.reduced, self.beside_BNX = reduced, beside

    @staticmethod
    def _behind(step: Step, x_BNC: Tensor, weights_BN: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(step, SegmentStep):
            return step.passed(x_BNC, weights_BN)
        assert not isinstance(step, Merge | Unmerge), step
        return step(x_BNC, weights_BN), None

    def rows(self, x_BNC: Tensor, tokens: Tensor | None = None) -> Tensor:
        """What counts in sums over the reduced stream's tokens, among these tokens (None: all): [B,N,C], or one row of
        tokens [1,X,C] where some are not there.
        """
        x_BNC = x_BNC if tokens is None else x_BNC[:, tokens]
        if self.weights_BN is None or (tokens is None and x_BNC.shape[1] != self.weights_BN.shape[1]):
            return x_BNC
        weights_BN = self.weights_BN if tokens is None else self.weights_BN[:, tokens]
        return x_BNC[weights_BN > 0.0].unsqueeze(0)

    def joined(self, others: "list[Pair]") -> "Pair":
        """With the inputs of others that are held out likewise; of streams whose tokens all count alike."""
        every = [self, *others]
        assert all(each.present_BN is None and each.held_out == self.held_out for each in every), len(every)
        dense = torch.cat([each.dense for each in every])
        same = all(each.reduced is each.dense for each in every)
        reduced = dense if same else torch.cat([each.reduced for each in every])
        return Pair(dense=dense, reduced=reduced, held_out=self.held_out)

    def row_weights(self, tokens: Tensor | None = None) -> Tensor | None:
        """By how much each of those rows counts, None for all alike."""
        return self.sizes_BN if self.sizes_BN is None or tokens is None else self.sizes_BN[:, tokens]


def mean_of_sources(x_BMC: Tensor, sources_BM: Tensor, count: int) -> Tensor:
    """For each of `count` tokens the mean of those of x whose source it is; sources below 0 are of none."""
    is_in_BMN = (sources_BM.unsqueeze(-1) == torch.arange(count, device=x_BMC.device)).to(x_BMC.dtype)
    return (is_in_BMN.transpose(1, 2) @ x_BMC) / is_in_BMN.sum(dim=1).unsqueeze(-1)


def _pieces(x_BNC: Tensor, weights_BN: Tensor | None, held_out: bool) -> Iterator[Pair]:
    size = max(1, CPU_TOKENS // x_BNC.shape[1]) if x_BNC.device.type == "cpu" else max(1, len(x_BNC))
    for start in range(0, len(x_BNC), size):
        piece_BNC = x_BNC[start : start + size]
        weights = None if weights_BN is None else weights_BN[start : start + size]
        yield Pair(dense=piece_BNC, reduced=piece_BNC, held_out=held_out, weights_BN=weights)


class Streams:
    """Both streams of every image, a few images at a time, float32, where they come from.

    Memory: 2 * images * N * C * 4 bytes, so 2.4 GB for 2,000 images of a model with 197 tokens of 768 channels.
    """

    def __init__(
        self,
        embedded: Iterable[Embedded],
        *,
        held_out_every: int = HELD_OUT_EVERY,
        second: Callable[[], Tensor] | None = None,
    ) -> None:
        """`embedded`: what enters the first block, batch by batch; each `held_out_every`-th image is held out. `second`
        tells instead which images of the batch just read are in the second of two halves, each of which judges what is
        fitted to the other.

        Raises BadInput for too few images.
        """
        self.pairs: list[Pair] = []
        self.in_splits = second is not None
        start = 0
        for x_BNC, weights_BN in embedded:
            positions_B = torch.arange(start, start + len(x_BNC), device=x_BNC.device)
            held_B = positions_B % held_out_every == held_out_every - 1
            if second is not None:
                held_B = second().to(x_BNC.device)
            for is_held, chosen_B in ((False, ~held_B), (True, held_B)):
                weights = None if weights_BN is None else weights_BN[chosen_B]
                self.pairs += _pieces(x_BNC[chosen_B], weights, is_held)
            start += len(x_BNC)
        if start < held_out_every:
            raise BadInput(
                f"closed loop: got {start} images, expected at least {held_out_every}, "
                "because one in so many is held out to choose how far to trust the fit"
            )

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    @property
    def device(self) -> torch.device:
        return self.pairs[0].dense.device

    def gather(self) -> None:
        """Makes larger pieces where inputs have become few tokens, which a CPU runs faster; all must count alike."""
        for is_held in (False, True):
            waiting = [pair for pair in self.pairs if pair.held_out == is_held]
            self.pairs = [pair for pair in self.pairs if pair.held_out != is_held]
            while waiting:
                first, *_ = waiting
                most = max(1, CPU_TOKENS // first.dense.shape[1]) if first.dense.device.type == "cpu" else 1
                ends = accumulate(len(pair.dense) for pair in waiting)
                count = max(1, sum(end <= most for end in ends))
                self.pairs.append(first if count == 1 else first.joined(waiting[1:count]))
                del waiting[:count]

    def advance(self, step: Step) -> None:
        """Both streams of all images through the same step."""
        for pair in self.pairs:
            pair.advance(step)


def entering_first(model: nn.Module) -> Callable[[Inputs], Embedded]:
    """What makes of a batch the first residual stream, where the model is."""

    def enter(batch: Inputs) -> Embedded:
        here = to_device(batch, device(model))
        return traced_model.embedded(model, here), traced_model.token_weights(model, here)

    return enter


def embedded(model: nn.Module, inputs: InputSet, batch_size: int) -> Iterator[Embedded]:
    """The first residual stream of every input, where the model is."""
    return map(entering_first(model), inputs.batches(batch_size))


def streams_of(
    enter: Callable[[Inputs], Embedded],
    inputs: InputSet,
    batch_size: int,
    *,
    half_ids: Tensor | None,
    held_out_every: int,
) -> Streams:
    """The streams of inputs of which those with these content ids are one half, the others the other; where all are in
    one, or no ids are given, each `held_out_every`-th is held out.
    """
    inside_B = torch.isin(inputs.ids, torch.zeros(0, dtype=torch.int64) if half_ids is None else half_ids)
    if half_ids is None or bool(inside_B.all()) or not bool(inside_B.any()):
        return Streams(map(enter, inputs.batches(batch_size)), held_out_every=held_out_every)
    ids, streams = half_ids, list[Tensor]()

    def read() -> Iterator[Embedded]:
        for batch in inputs.read(batch_size):
            if len(batch.ids):
                streams.append(torch.isin(batch.ids, ids))
                yield enter(batch.inputs)

    return Streams(read(), held_out_every=held_out_every, second=streams.pop)
