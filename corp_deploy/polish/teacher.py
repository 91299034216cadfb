"""What the dense model makes of the calibration inputs: the outputs and streams that a reduced model is fitted to.

Legend: B inputs, N tokens, C channels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.input_set import InputSet
from calib.inputs import Inputs, each, joined, moved, named, pieces
from corp_deploy.families.family import family_of
from corp_deploy.families.modules import device

from .walk import streams

_AT_ONCE = 8  # inputs of a forward pass, always the same: rounding is that of a pass's form


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Some inputs, the residual stream that enters the first block [B,N,C], which tokens are there [B,N] (None: all),
    and the dense model's streams behind its blocks [B,N,C] and outputs [B,...].
    """

    inputs: Inputs
    entering_BNC: Tensor
    weights_BN: Tensor | None
    streams: tuple[Tensor, ...]
    outputs: Tensor

    def changed(self, every: Callable[[Tensor], Tensor], targets: Callable[[Tensor], Tensor]) -> "Lesson":
        """`every` of all tensors, then `targets` of those that the model is fitted to."""
        return Lesson(
            inputs=each(self.inputs, every),
            entering_BNC=every(self.entering_BNC),
            weights_BN=None if self.weights_BN is None else every(self.weights_BN),
            streams=tuple(targets(every(stream)) for stream in self.streams),
            outputs=targets(every(self.outputs)),
        )

    @property
    def size_bytes(self) -> int:
        weights = () if self.weights_BN is None else (self.weights_BN,)
        tensors = (*named(self.inputs).values(), self.entering_BNC, *weights, *self.streams, self.outputs)
        return sum(tensor.nbytes for tensor in tensors)


def _row(lesson: Lesson, row: int) -> Lesson:
    """One of its inputs alone, the targets in float16."""
    return lesson.changed(lambda tensor: tensor[row : row + 1].clone(), lambda tensor: tensor.half())


def joined_lessons(lessons: Sequence[Lesson]) -> Lesson:
    """Several as one batch, the targets in float32."""
    weights = [lesson.weights_BN for lesson in lessons if lesson.weights_BN is not None]
    return Lesson(
        inputs=joined([lesson.inputs for lesson in lessons]),
        entering_BNC=torch.cat([lesson.entering_BNC for lesson in lessons]),
        weights_BN=torch.cat(weights) if weights else None,
        streams=tuple(torch.cat(rows).float() for rows in zip(*(lesson.streams for lesson in lessons), strict=True)),
        outputs=torch.cat([lesson.outputs for lesson in lessons]).float(),
    )


class Teacher:
    """The dense model's lessons on inputs by their position, each image as it is and mirrored: row 2 p and 2 p + 1.

    Kept in float16 beside their inputs where they fit into `cache_bytes`, else made anew whenever they are asked for.
    """

    def __init__(self, model: nn.Module, inputs: InputSet, *, mirrored: bool, cache_bytes: int) -> None:
        self.model, self.inputs, self.device = model, inputs, device(model)
        self.views = 2 if mirrored and family_of(model).input_spec(model).medium == "images" else 1
        self._kept = self._all_kept(cache_bytes)

    def __len__(self) -> int:
        return (self.inputs.count if self._kept is None else len(self._kept) // self.views) * self.views

    def rows(self, positions: Iterable[int], *, mirrored: bool) -> list[int]:
        """The rows of inputs at these positions, with or without those of their mirrored views."""
        views = self.views if mirrored else 1
        return [position * self.views + view for position in positions for view in range(views)]

    @torch.no_grad()
    def _lesson(self, inputs: Inputs) -> Lesson:
        family = family_of(self.model)
        entering_BNC = family.embedded(self.model, inputs)
        weights_BN = family.token_weights(self.model, inputs)
        behind = tuple(tokens.x for tokens in streams(self.model, entering_BNC, weights_BN))
        outputs = family.finished(self.model, behind[-1], inputs)
        return Lesson(inputs=inputs, entering_BNC=entering_BNC, weights_BN=weights_BN, streams=behind, outputs=outputs)

    def _view(self, inputs: Inputs, view: int) -> Inputs:
        return each(inputs, lambda tensor: tensor.flip(-1)) if view else inputs

    def _all_kept(self, cache_bytes: int) -> list[Lesson] | None:
        """One lesson a row, or None where they take too much or are beyond float16."""
        kept: list[Lesson] = []
        for batch in self.inputs.batches(_AT_ONCE):
            here = moved(batch, self.device)
            views = [self._lesson(self._view(here, view)) for view in range(self.views)]
            kept += [_row(lesson, row) for row in range(len(views[0].outputs)) for lesson in views]
            if kept[0].size_bytes * self.inputs.count * self.views > cache_bytes:
                return None
            if not all(bool(target.isfinite().all()) for target in (*kept[-1].streams, kept[-1].outputs)):
                return None
        return kept

    def lesson(self, rows: Sequence[int]) -> Lesson:
        """The lesson of these rows, where the model is."""
        if self._kept is not None:
            return joined_lessons([self._kept[row] for row in rows])
        by_position = sorted({row // self.views for row in rows})
        read = joined(list(self.inputs.subset(by_position).batches(_AT_ONCE)))
        singles = list(pieces(moved(read, self.device), 1))
        chosen = [self._view(singles[by_position.index(row // self.views)], row % self.views) for row in rows]
        return self._lesson(joined(chosen))
