"""Options of sparse weights. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from corp_deploy.algebra.sparsity import (
    DEFAULT_PERMUTE,
    DEFAULT_RULE,
    KINDS,
    Permute,
    Rule,
    SparseKind,
    Sparsity,
    sparsity_from_text,
)
from ground.errors import BadInput

from .option import Record, option
from .values import ParsedText

EXPECTED = "2:4 for all sites, or mlp=2:4,head=2:4,conv=2:4, any of which may be left out"


def sparsities_from_text(text: str) -> dict[SparseKind, Sparsity]:
    """A pattern for every kind of site, or kind by kind. Raises BadInput for what is neither."""
    if "=" not in text:
        return dict.fromkeys(KINDS, sparsity_from_text(text))
    words = [part.strip().partition("=") for part in text.split(",")]
    given = {name: pattern for name, _, pattern in reversed(words)}
    by_kind = {kind: sparsity_from_text(given[kind]) for kind in KINDS if kind in given}
    if len(by_kind) != len(words):
        raise BadInput(f"{text[:80]!r}: expected {EXPECTED}, each once")
    return by_kind


PATTERNS = ParsedText(
    span="2:4|mlp=2:4,head=2:4,conv=2:4",
    expected=f"a text that is not empty, {EXPECTED}",
    kind=dict,
    read=sparsities_from_text,
)


@dataclass(frozen=True, kw_only=True)
class SparseChoice(Record, heading="Sparse weights"):
    """Which weights become zero, last of all."""

    sparse: str | Mapping[SparseKind, Sparsity] | None = option(
        PATTERNS,
        help="As the last step, keep 2 of every 4 neighbouring weights in the layers of sites and refit them by "
        "least squares, alone or on reduced widths; also by kind of site. Only 2:4 has kernels (build "
        "--sparse), which TensorRT uses where they are faster; other K:N are for analysis. Default: none.",
    )
    sparse_pattern: Rule = option(
        default=DEFAULT_RULE,
        help="Which weights are kept: obs, in SparseGPT's order by the exact cost of dropping them; cast, by "
        "CAST's cost of each group by itself; magnitude, the largest.",
    )
    sparse_permute: Permute = option(
        default=DEFAULT_PERMUTE,
        help="First permute the inputs of each site's last layer, by reordering the rows of the previous layer "
        "(inside), and also the residual stream of a plain ViT with a classifier (stream): nothing is "
        "permuted at run time.",
    )

    @property
    def patterns(self) -> Mapping[SparseKind, Sparsity]:
        """By kind of site; empty where none are asked for."""
        assert not isinstance(self.sparse, str), self.sparse
        return self.sparse or {}
