"""Which kind a site is of: the one place where that is decided. A third kind is a file like the two and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

from corp_deploy.families.site import Site

from .channel_kind import ChannelKind
from .head_kind import HeadKind
from .kind import Kind

KINDS: Mapping[str, Kind] = MappingProxyType({"channels": ChannelKind(), "heads": HeadKind()})


def kind_of(site: Site) -> Kind:
    """What can be done to this site."""
    return KINDS[site.kind]
