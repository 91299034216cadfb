"""Which kind a site is of: the one place where that is decided. A further kind is a file like these and a line here."""

from collections.abc import Mapping

from corp_deploy.traced.models.sites import Site

from .kind import Kind
from .traced_kind import TracedKind
from .traced_pairs_kind import TracedPairsKind
from .traced_values_kind import TracedValuesKind

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
