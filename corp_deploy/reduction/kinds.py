"""The kinds of sites: what can be done to each, and the only place that decides which kind a site is of.

A reduction is (site, moments, method, width) -> TracedReduced; a new kind is a file like these and a line here.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.traced.models.sites import Site

from .change import TracedReduced
from .method import Method
from .pairs_kind import TracedPairsKind
from .reader_kind import TracedKind
from .values_kind import TracedValuesKind


class Kind(Protocol):
    """The operations on sites of one kind; every function takes a site of that kind only."""

    eliminates: ClassVar[bool]
    """True if an order of removal serves every width."""

    def moments_at(self, site: Any, moments: Moments, device: torch.device) -> Any:
        """Return the statistics of one site, on the device. Raises BadInput for moments without them."""

    def rest_of(self, own: Any, half: Any) -> Any:
        """Subtract the statistics `half`, of some of a site's images, from those of all its images."""

    def sparsity(self, method: Method) -> float | None:
        """Return the method's sparsity for sites of this kind, None if it has none."""

    def uniform(self, site: Any, method: Method) -> int | None:
        """Return the width for the method's own sparsity, aligned; None where the method leaves the site alone."""

    def widths(self, site: Any, method: Method) -> tuple[int, ...]:
        """Return every aligned width that all heads or parts of the site can have alike, narrowest first."""

    def offers(self, site: Any, method: Method) -> tuple[int, ...]:
        """Return every width that a budget may choose, narrowest first, the site's own last."""

    def refusal(self, site: Any, method: Method) -> str:
        """Return why the method can't reduce this site, an empty text if it can."""

    def note(self, site: Any, method: Method, width: Any) -> str | None:
        """Return a sentence on what stays unchanged here although a reduction was asked, None if nothing does."""

    def chosen(self, site: Any, moments: Any, method: Method, width: Any, cached: Any = None) -> Tensor | None:
        """Return the channels of the site that stay at one width, ascending, for `reduced` to take as `cached`.

        None where `reduced` makes the choice itself. `cached` is an elimination computed before, for selection `obs`.
        """

    def reduced(
        self,
        site: Any,
        moments: Any,
        method: Method,
        width: Any,
        *,
        cached: Any = None,
        held_out: Any = None,
        splits: Any = None,
    ) -> TracedReduced:
        """Reduce the site to one width, repaired by its moments.

        `cached` is an order of removal or a choice computed before; `held_out`, moments of other inputs, give the
        report's held-out error; `splits`, the moments of two halves of the images, choose the strength of ridges.
        """

    def elimination(self, site: Any, moments: Any, method: Method) -> Elimination | None:
        """Return the whole order of removal, which serves every width; None where the kind has none."""

    def errors(self, site: Any, moments: Any, method: Method, cached: Any) -> tuple[float, ...]:
        """Return the site's loss at each width of `offers`, in a unit of its own."""


KINDS: Mapping[str, Kind] = {
    "traced channels": TracedKind[Site]("channels"),
    "traced convolutions": TracedKind[Site]("convolutions"),
    "traced queries and keys": TracedPairsKind(),
    "traced streams": TracedKind[Site]("streams"),
    "traced values": TracedValuesKind(),
}


def kind_of(site: Site) -> Kind:
    return KINDS[site.kind]
