"""The images that merged channels and heads are fitted to and judged by."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.inputs import Inputs, InputSet, map_tensors
from calib.moments import Moments
from ground.errors import BadInput

BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownInputs:
    """Images, and by their content which were calibrated on and which are held out; the others are left out."""

    images: InputSet
    fit_ids: Tensor
    held_out_ids: Tensor

    @classmethod
    def of(cls, images: InputSet, moments: Moments, held_out: Moments | None) -> "ShownInputs":
        """Raises BadInput unless some are of each kind that is there."""
        held_out_ids = images.ids[:0] if held_out is None else held_out.image_ids
        rest = images.ids[~torch.isin(images.ids, held_out_ids)]
        fit_ids = moments.image_ids if len(moments.image_ids) else rest
        shown = cls(images=images, fit_ids=fit_ids, held_out_ids=held_out_ids)
        shown._refuse_none("calibration", shown.fit_ids)
        if held_out is not None:
            shown._refuse_none("held-out", held_out_ids)
        return shown

    def _refuse_none(self, kind: str, ids: Tensor) -> None:
        if not torch.isin(self.images.ids, ids).any():
            raise BadInput(
                f"--images: none of these {self.images.count} images is a {kind} one by its content, and merged "
                f"channels are fitted to and judged on those; give the {kind} images that the moments were taken on"
            )

    @property
    def fitted(self) -> int:
        """How many of the images are calibration images."""
        return int(torch.isin(self.images.ids, self.fit_ids).sum())

    def batches(self) -> Iterator[tuple[Inputs, bool]]:
        """Inputs of one kind, and whether they are held out."""
        for batch in self.images.read(BATCH_SIZE):
            for ids, is_held in ((self.fit_ids, False), (self.held_out_ids, True)):
                chosen_B = torch.isin(batch.ids, ids)
                if chosen_B.any():
                    yield map_tensors(batch.inputs, lambda tensor, chosen_B=chosen_B: tensor[chosen_B]), is_held  # type: ignore[misc]
