"""What a kind of site has to offer, and which kind a site is of: the one place where that is decided. A reduction is
(site, moments, method, width) -> TracedReduced; a further kind is a file like these and a line here.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.spec.widths import Width
from corp_deploy.traced.models.sites import Site

from .change import TracedReduced
from .method import Method
from .pairs_kind import TracedPairsKind
from .reader_kind import TracedKind
from .values_kind import TracedValuesKind


class Kind(Protocol):
    """What can be done to sites of one kind; every function is given such a site alone."""

    eliminates: ClassVar[bool]
    """Whether there is an order of removal that serves every width."""

    def moments_at(self, site: Any, moments: Moments, device: torch.device) -> Any:
        """The statistics of one site, on the device. Raises BadInput when the moments were taken without it."""

    def rest_of(self, own: Any, half: Any) -> Any:
        """Statistics of a site's own images without those that `half`, of some of the same ones, is of."""

    def sparsity(self, method: Method) -> float | None:
        """The share that uniform sparsities remove here."""

    def uniform(self, site: Any, method: Method) -> Width | None:
        """The width for the method's own sparsity, aligned; None where the method leaves the site alone."""

    def widths(self, site: Any, method: Method) -> tuple[Width, ...]:
        """Every width that one number may stand for, narrowest first."""

    def offers(self, site: Any, method: Method) -> tuple[Width, ...]:
        """Every width that a budget may choose, narrowest first, the site's own last."""

    def refusal(self, site: Any, method: Method) -> str:
        """Why the method can't do here what it does elsewhere, or nothing."""

    def note(self, site: Any, method: Method, width: Any) -> str | None:
        """What stays as it is although something was asked of it."""

    def chosen(self, site: Any, moments: Any, method: Method, width: Any, cached: Any = None) -> Tensor | None:
        """The channels that stay of the site at one width, ascending, for `reduced` to take as `cached`; None where it
        chooses otherwise. `cached` spares `obs` its elimination.
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
        """The site at one width, repaired by its moments. `cached`, an order of removal or what was chosen, spares
        work; `held_out`, moments of other inputs, judges it again; `splits`, the moments of either half of the images,
        choose how strong ridges are.
        """

    def elimination(self, site: Any, moments: Any, method: Method) -> Elimination | None:
        """The whole order of removal, which serves every width; None where the kind has none."""

    def errors(self, site: Any, moments: Any, method: Method, cached: Any) -> tuple[float, ...]:
        """What the site loses at each width that `offers` has, in a unit of its own."""


KINDS: Mapping[str, Kind] = {
    "traced channels": TracedKind[Site]("channels"),
    "traced convolutions": TracedKind[Site]("convolutions"),
    "traced queries and keys": TracedPairsKind(),
    "traced streams": TracedKind[Site]("streams"),
    "traced values": TracedValuesKind(),
}


def kind_of(site: Site) -> Kind:
    """What can be done to this site."""
    return KINDS[site.kind]
