"""What the dense model makes of the calibration inputs: the outputs and streams that a reduced model is fitted to, and
how far one is from those.

Legend: B inputs, N tokens, M source tokens, C channels, K blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calib.inputs import Inputs, InputSet, chunks, concatenated, map_tensors, tensors_by_name, to_device
from corp_deploy.families import traced_model
from corp_deploy.reduction.streams import mean_of_sources
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.token_merging import Tokens
from ground.errors import BadInput

from .descent import Draw
from .walk import joined_answers, streams

_LEAST = 1e-12
_LEAST_AREA = 0.35


def view(image_CHW: Tensor, seed: int, number: int) -> Tensor:
    """The image itself, or half of the time a part of it, 0.35 to all of its area, brought back to its size, half of
    those mirrored.

    The same for the same seed and number, wherever the image is. A few hundred images are soon known by heart; of views
    there is no end (a teacher that sees what the student sees: Beyer et al., arXiv 2106.05237), and none needs a label.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    other, area, down, right, mirror = torch.rand(5, generator=generator).tolist()
    if other < 0.5:
        return image_CHW
    height, width = image_CHW.shape[-2:]
    side = (_LEAST_AREA + (1.0 - _LEAST_AREA) * area) ** 0.5
    tall, wide = max(1, round(height * side)), max(1, round(width * side))
    top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
    part = image_CHW[:, top : top + tall, left : left + wide]
    resized = F.interpolate(part.unsqueeze(0), size=(height, width), mode="bilinear", align_corners=False)[0]
    return resized.flip(-1) if mirror < 0.5 else resized


_AT_ONCE = 8  # inputs of a forward pass, always the same: rounding is that of a pass's form


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherBatch:
    """Some inputs, the residual stream that enters the first block [B,N,C], which tokens are there [B,N] (None: all),
    and the dense model's streams behind its blocks [B,N,C] and outputs [B,...].
    """

    inputs: Inputs
    entering_BNC: Tensor
    weights_BN: Tensor | None
    streams: tuple[Tensor, ...]
    outputs: Tensor

    @property
    def size_bytes(self) -> int:
        weights = () if self.weights_BN is None else (self.weights_BN,)
        tensors = (*tensors_by_name(self.inputs).values(), self.entering_BNC, *weights, *self.streams, self.outputs)
        return sum(tensor.nbytes for tensor in tensors)


def _row(lesson: TeacherBatch, row: int) -> TeacherBatch:
    """One of its inputs alone, the targets in float16."""

    def own(tensor: Tensor) -> Tensor:
        return tensor[row : row + 1].clone()

    return TeacherBatch(
        inputs=map_tensors(lesson.inputs, own),
        entering_BNC=own(lesson.entering_BNC),
        weights_BN=None if lesson.weights_BN is None else own(lesson.weights_BN),
        streams=tuple(own(stream).half() for stream in lesson.streams),
        outputs=own(lesson.outputs).half(),
    )


def joined_lessons(lessons: Sequence[TeacherBatch]) -> TeacherBatch:
    """Several as one batch, the targets in float32."""
    weights = [lesson.weights_BN for lesson in lessons if lesson.weights_BN is not None]
    return TeacherBatch(
        inputs=concatenated([lesson.inputs for lesson in lessons]),
        entering_BNC=torch.cat([lesson.entering_BNC for lesson in lessons]),
        weights_BN=torch.cat(weights) if weights else None,
        streams=tuple(torch.cat(rows).float() for rows in zip(*(lesson.streams for lesson in lessons), strict=True)),
        outputs=torch.cat([lesson.outputs for lesson in lessons]).float(),
    )


@torch.no_grad()
def lesson_on(model: nn.Module, inputs: Inputs) -> TeacherBatch:
    """What the dense model makes of these inputs, which are where it is."""
    entering_BNC = traced_model.embedded(model, inputs)
    weights_BN = traced_model.token_weights(model, inputs)
    walked = streams(model, entering_BNC, weights_BN)
    behind = tuple(tokens.x for tokens in walked)
    outputs = joined_answers(model, walked[-1], inputs)
    return TeacherBatch(
        inputs=inputs, entering_BNC=entering_BNC, weights_BN=weights_BN, streams=behind, outputs=outputs
    )


class Teacher:
    """The dense model's lessons on inputs as they are, by their rows.

    Kept in float16 beside their inputs where they fit into `cache_bytes`, else made anew whenever they are asked for.
    """

    def __init__(self, model: nn.Module, inputs: InputSet, *, cache_bytes: int) -> None:
        self.model, self.inputs, self.device = model, inputs, device(model)
        self._kept = self._all_kept(cache_bytes)

    def __len__(self) -> int:
        return self.inputs.count if self._kept is None else len(self._kept)

    def _all_kept(self, cache_bytes: int) -> list[TeacherBatch] | None:
        """One lesson a row, or None where they take too much or are beyond float16."""
        kept: list[TeacherBatch] = []
        for batch in self.inputs.batches(_AT_ONCE):
            lesson = lesson_on(self.model, to_device(batch, self.device))
            kept += [_row(lesson, row) for row in range(len(lesson.outputs))]
            too_large = kept[0].size_bytes * self.inputs.count > cache_bytes
            if too_large or not all(bool(each.isfinite().all()) for each in (*kept[-1].streams, kept[-1].outputs)):
                return None
        return kept

    def lesson(self, draws: Sequence[Draw]) -> TeacherBatch:
        """The lesson of these rows, where the model is."""
        if self._kept is not None:
            return joined_lessons([self._kept[draw.row] for draw in draws])
        read = inputs_at(self.inputs, [draw.row for draw in draws])
        return lesson_on(self.model, to_device(concatenated(read), self.device))


class AugmentedTeacher:
    """The dense model's lessons on images, another view of each at every draw, so they are always made anew.

    The images themselves are kept where they fit into `cache_bytes`.
    """

    def __init__(self, model: nn.Module, images: InputSet, *, seed: int, cache_bytes: int) -> None:
        self.model, self.images, self.seed, self.device = model, images, seed, device(model)
        size_bytes = sum(tensor.nbytes for tensor in tensors_by_name(images.example()).values()) * images.count
        self._kept = _singles(images) if size_bytes <= cache_bytes else None

    def __len__(self) -> int:
        return self.images.count if self._kept is None else len(self._kept)

    def lesson(self, draws: Sequence[Draw]) -> TeacherBatch:
        """The lesson of views of these rows by the numbers of their draws, where the model is."""
        rows = [draw.row for draw in draws]
        images = inputs_at(self.images, rows) if self._kept is None else [self._kept[row] for row in rows]
        views = [
            map_tensors(image, lambda tensor, number=draw.number: view(tensor[0], self.seed, number).unsqueeze(0))  # type: ignore[misc]
            for image, draw in zip(images, draws, strict=True)
        ]
        return lesson_on(self.model, to_device(concatenated(views), self.device))


AnyTeacher = Teacher | AugmentedTeacher


def _singles(inputs: InputSet) -> list[Inputs]:
    """All of them, one at a time."""
    return [row for batch in inputs.batches(_AT_ONCE) for row in chunks(batch, 1)]


def inputs_at(inputs: InputSet, positions: Sequence[int]) -> list[Inputs]:
    """Inputs at these positions, read again, one at a time. Raises BadInput for one that can't be."""
    ascending = sorted(set(positions))
    read = _singles(inputs.subset(ascending))
    if len(read) != len(ascending):
        raise BadInput(
            f"polish: unreadable {inputs.noun} among {inputs.count}, more than are kept in memory; leave those out"
        )
    return [read[ascending.index(position)] for position in positions]


def stream_error(reduced: Tokens, dense_BMC: Tensor, *, read: Tensor | None = None) -> Tensor:
    """Squared error of a stream, each token's relative to the square of what it should be, mean over the tokens that
    are there, or over those of these places. A merged token should be the mean of the dense tokens that it stands for,
    and counts as often.

    By token, because what reads a stream normalises each token, and a few of them can be far longer than the rest.
    """
    reduced_BNC, weights_BN, sources_BM = reduced
    dense_BNC = dense_BMC if sources_BM is None else mean_of_sources(dense_BMC, sources_BM, reduced_BNC.shape[1])
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
    square_B = dense.reshape(len(dense), -1).square().sum(dim=1).clamp_min(_LEAST)
    return ((reduced - dense).reshape(len(dense), -1).square().sum(dim=1) / square_B).mean()


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
