"""What is known of one tensor of a program: its shape at a batch of 1, and the labels of its elements."""

from dataclasses import dataclass

from torch import Tensor

from .labels import tidy, varying


@dataclass(frozen=True, slots=True)
class Marks:
    """`labels` are of `shape`, tidy; None where no element can be removed, and `why` says what they come from.
    `constant`: its name, of a parameter or constant, whose elements are removed with whatever they meet.
    """

    shape: tuple[int, ...]
    labels: Tensor | None = None
    why: str = ""
    constant: str = ""

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes that the labels vary along."""
        return () if self.labels is None else varying(self.labels)

    @property
    def is_fixed(self) -> bool:
        """Whether no element of it can be removed."""
        return self.labels is None and not self.constant


def marked(labels: Tensor, why: str = "") -> Marks:
    """What these labels say, untidy as they may be."""
    return Marks(tuple(labels.shape), tidy(labels), why)
