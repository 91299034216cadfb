"""K:N sparsity, at most K nonzero of every N neighbouring weights, and the choices of how weights are zeroed."""

from dataclasses import dataclass
from typing import Literal, get_args

from ground.errors import BadInput

Rule = Literal["obs", "cast", "magnitude"]
"""The cost by which weights to zero are chosen: the exact one, CAST's of a group by itself, or the magnitude."""
SparseKind = Literal["mlp", "head", "conv"]
"""The kind of site that a sparse layer belongs to."""
Permute = Literal["none", "inside", "stream"]
"""The channels that are reordered first: none, those inside sites, or those of the residual stream too."""
Target = Literal["reduced", "own"]
"""The outputs that a layer is fitted to: in the model without zeros, or of its dense weights on its sparse inputs."""
KINDS: tuple[SparseKind, ...] = get_args(SparseKind)
DEFAULT_RULE: Rule = "obs"
DEFAULT_PERMUTE: Permute = "none"  # after the refit, reordering gains nothing, see benchmarks/quality/sparsity.py
RIDGE_REL = 1e-4
LONGEST = 8  # 4:8 has 70 patterns of a group, 8:16 has 12,870


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity:
    """A sparsity with at most `kept` nonzero of every `of` neighbouring weights along the summed axis."""

    kept: int
    of: int

    def __post_init__(self) -> None:
        if not 0 < self.kept < self.of <= LONGEST:
            raise BadInput(f"sparsity {self}: expected K:N with 0 < K < N <= {LONGEST}, such as 2:4")

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"

    @property
    def share(self) -> float:
        return self.kept / self.of


def sparsity_from_text(text: str) -> Sparsity:
    """Parse K:N, such as 2:4; raise BadInput for anything else, also for N above 8."""
    words = text.strip().split(":")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) <= 2 for word in words):
        raise BadInput(f"sparsity {text[:40]!r}: expected K:N, such as 2:4")
    return Sparsity(kept=int(words[0]), of=int(words[1]))
