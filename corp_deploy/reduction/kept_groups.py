"""Kept channels, dimensions or heads of a site at one width, selected before recovery.

Legend: K channels kept, H heads, M heads left, D dimensions of queries and keys.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The channels that stay, ascending."""

    kept_K: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsChosen:
    """The heads that stay, all of them where none goes, and what ranks the dimensions of queries and keys of every
    dense head; None where these may not go.
    """

    kept_M: Tensor
    scores_HD: Tensor | None
