"""k:n sparsity: a number of weights that may stay of every few neighbours, and how they are set to zero. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from ground.errors import BadInput

Rule = Literal["obs", "cast", "magnitude"]
"""By what weights stay: the exact cost of dropping them, CAST's cost of a group by itself, their size."""
SparseKind = Literal["mlp", "head", "conv"]
"""Of which sites layers are."""
Permute = Literal["none", "inside", "stream"]
"""What is put into another order first: nothing, what a site's last layer reads by the rows that give it, and the
residual stream too.
"""
Target = Literal["reduced", "own"]
"""What a layer is fitted to: what it gave in the model without zeros, or what its weights without zeros give on the
stream as it is by then.
"""
KINDS: tuple[SparseKind, ...] = get_args(SparseKind)
DEFAULT_RULE: Rule = "obs"
DEFAULT_PERMUTE: Permute = "none"  # after the refit orders gain nothing, see benchmarks/quality/sparsity.py
RIDGE_REL = 1e-4
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
