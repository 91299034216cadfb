"""Refusals of options without effect on a model: it has no sites of their kind."""

from collections.abc import Mapping

from torch import nn

from corp_deploy.traced.models.sites import Sites
from ground.errors import BadInput

from .family import sites_of

MLPS, HEADS, CONVOLUTIONS = "channels", "heads", "convolutions"
WORDS: Mapping[str, str] = {MLPS: "MLPs", CONVOLUTIONS: "channels between convolutions", HEADS: "attention"}
"""What a model without sites of a kind is said to be without."""


STREAMS = "traced streams"
HONOURED: Mapping[str, str] = {
    "traced channels": MLPS,
    "traced convolutions": CONVOLUTIONS,
    "traced queries and keys": HEADS,
    STREAMS: CONVOLUTIONS,
    "traced values": HEADS,
}
"""Which kind's options those honour that were found in a program."""


def kinds_of(model: nn.Module) -> frozenset[str]:
    """Of its sites, reducible or not."""
    return frozenset(HONOURED[kind] for kind in sites_of(model).kinds)


def taps_for(sites: Sites, kind: str) -> frozenset[str]:
    """What is heard for those sites alone that honour the options of this kind."""
    taps = [(HONOURED[site.kind], tap.name) for site in sites.every for tap in site.listening()]
    return frozenset(name for _, name in taps) - {name for other, name in taps if other != kind}


def require_streams(sites: Sites, name: str) -> None:
    """Raise BadInput where no stream has channels that --residual could remove."""
    if STREAMS not in sites.kinds:
        raise BadInput(f"--residual: no stream of this model ({name}) has channels that can be removed")


def refuse_idle_options(model: nn.Module, kind: str, options: Mapping[str, object]) -> None:
    """Raise BadInput for an option, by its name and with what was given, that only sites of this kind honour, where
    there are none; None and False were not given.
    """
    kinds = kinds_of(model)
    if kind in kinds:
        return
    for name, value in options.items():
        if value is not None and value is not False:
            shown = name if value is True else f"{name} {value}"
            there = ", ".join(WORDS[each] for each in sorted(kinds)) or "no sites"
            raise BadInput(
                f"{shown} is not honoured by a model without {WORDS[kind]} ({type(model).__name__}, which has "
                f"{there}); leave it out"
            )
