"""k:n sparsity: a number of weights that may stay of every few neighbours. No torch."""

from dataclasses import dataclass
from typing import Literal

from ground.errors import BadInput

Rule = Literal["obs", "cast", "magnitude"]
"""By what weights stay: the exact cost of dropping them, CAST's cost of a group by itself, their size."""
LONGEST = 8  # 4:8 has 70 patterns of a group, 8:16 has 12,870


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """At most `kept` of every `of` neighbouring weights along the summed axis are not zero."""

    kept: int
    of: int

    def __post_init__(self) -> None:
        if not 0 < self.kept < self.of <= LONGEST:
            raise BadInput(f"sparsity {self}: expected K:N with 0 < K < N <= {LONGEST}, such as 2:4")

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"

    @property
    def share(self) -> float:
        """Of the weights, that stay."""
        return self.kept / self.of


def sparsity_from_text(text: str) -> Sparsity:
    """2:4 as people write it. Raises BadInput for anything else than K:N."""
    words = text.strip().split(":")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) <= 2 for word in words):
        raise BadInput(f"sparsity {text[:40]!r}: expected K:N, such as 2:4")
    return Sparsity(kept=int(words[0]), of=int(words[1]))
