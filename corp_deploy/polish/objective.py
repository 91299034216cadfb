"""How far a reduced model is from its lessons: relative squared errors of outputs and streams.

Legend: B inputs, N tokens, M source tokens, C channels, K blocks.
"""

import torch
from torch import Tensor, nn

from corp_deploy.reduction.streams import mean_of_sources
from corp_deploy.traced.models.token_merging import Tokens

from .teacher import TeacherBatch
from .walk import joined_answers, streams

_LEAST = 1e-12


def stream_error(reduced: Tokens, dense_BMC: Tensor, *, read: Tensor | None = None) -> Tensor:
    """Squared error of a stream, each token's relative to the square of what it should be, mean over the tokens that
    are there, or over those of these places. A merged token should be the mean of the dense tokens that it stands for,
    and counts as often.

    By token, because what reads a stream normalises each token, and a few of them can be far longer than the rest.
    """
    reduced_BNC, weights_BN, sources_BM = reduced
    count = reduced_BNC.shape[1]
    dense_BNC = dense_BMC if sources_BM is None else mean_of_sources(dense_BMC, sources_BM, count)
    if read is not None:
        reduced_BNC, dense_BNC = reduced_BNC[:, read], dense_BNC[:, read]
        weights_BN = None if weights_BN is None else weights_BN[:, read]
    square_BN = dense_BNC.square().sum(dim=-1).clamp_min(_LEAST)
    error_BN = (reduced_BNC - dense_BNC).square().sum(dim=-1) / square_BN
    if weights_BN is None or weights_BN.shape != error_BN.shape:  # of what is pooled all counts alike
        return error_BN.mean()
    return (error_BN * weights_BN).sum() / weights_BN.sum().clamp_min(1.0)


def output_error(reduced: Tensor, dense: Tensor) -> Tensor:
    """Squared error of outputs [B,...], each input's relative to its own square, mean over the inputs."""
    square_B = dense.flatten(1).square().sum(dim=1).clamp_min(_LEAST)
    return ((reduced - dense).flatten(1).square().sum(dim=1) / square_B).mean()


class Student(nn.Module):
    """The reduced model with its errors on a lesson for a result, so that whatever wraps a module can wrap this."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, lesson: TeacherBatch) -> Tensor:
        """Squared relative errors [1 + K]: of the outputs, then of the stream behind each block."""
        behind = streams(self.model, lesson.entering_BNC, lesson.weights_BN)
        outputs = joined_answers(self.model, behind[-1], lesson.inputs)
        by_block = [stream_error(mine, dense) for mine, dense in zip(behind, lesson.streams, strict=True)]
        return torch.stack([output_error(outputs, lesson.outputs), *by_block])
