"""Which weights a reduction sets to zero, as a command or a recipe asks for it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corp_deploy.algebra.sparsity import Rule, Sparsity, sparsity_from_text
from corp_deploy.reduction.sparse_options import DEFAULT_PERMUTE, DEFAULT_RULE, KINDS, Permute, SparseKind
from ground.errors import BadInput

from .reduction_table import SPARSE

EXPECTED = "2:4 for all sites, or mlp=2:4,head=2:4,conv=2:4, any of which may be left out"


def sparsities_from_text(text: str) -> dict[SparseKind, Sparsity]:
    """A pattern for every kind of site, or kind by kind. Raises BadInput for what is neither."""
    if "=" not in text:
        return dict.fromkeys(KINDS, sparsity_from_text(text))
    words = [part.strip().partition("=") for part in text.split(",")]
    by_kind = {kind: sparsity_from_text(words_of[0]) for kind in KINDS if (words_of := _of_kind(words, kind))}
    if len(by_kind) != len(words):
        raise BadInput(f"{text[:80]!r}: expected {EXPECTED}, each once")
    return by_kind


def _of_kind(words: list[tuple[str, str, str]], kind: str) -> list[str]:
    return [pattern for name, _, pattern in words if name == kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseChoice:
    """Patterns by kind of site, none where nothing is asked; `sparse_pattern`: by what rule a weight stays,
    `sparse_permute`: whether a layer's inputs are put into another order first.
    """

    sparse: Mapping[SparseKind, Sparsity] = field(default_factory=dict)
    sparse_pattern: Rule = DEFAULT_RULE
    sparse_permute: Permute = DEFAULT_PERMUTE

    @property
    def asked(self) -> bool:
        return bool(self.sparse)

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for an option of a sparsity that was not asked for."""
        SPARSE.refuse([("", "sparse" if self.asked else "none")], options)


def sparse_from_options(options: Mapping[str, Any]) -> SparseChoice:
    """As these values of the options of `reduce` ask for it; None is a default."""
    sparse = options.get("sparse")
    given = {name: options.get(name) for name in ("sparse_pattern", "sparse_permute")}
    return SparseChoice(
        sparse=sparsities_from_text(sparse) if isinstance(sparse, str) else sparse or {},
        **{name: value for name, value in given.items() if value is not None},
    )
