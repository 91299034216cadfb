"""Options that are told apart by the kind of site: mlp=wanda,head=magnitude."""

from collections.abc import Mapping
from typing import Any

import click

from corp_deploy.reduction.method import (
    CHANNEL_REPAIRS,
    CONV_RANKINGS,
    CONV_REPAIRS,
    HEADS_RANKINGS,
    HEADS_REPAIRS,
    MLP_RANKINGS,
    MLP_REPAIRS,
    QK_RANKINGS,
)

CHANNELS = "channels"
"""What one word alone is of: channels of MLPs and of convolutions, whichever are reduced."""


class ByKind(click.ParamType[dict[str, str]]):
    """mlp=HOW,head=HOW,... of which any may be left out, or HOW alone for channels of both kinds."""

    def __init__(self, known: Mapping[str, tuple[str, ...]]) -> None:
        self.known = known
        self.name = f"how|{','.join(f'{kind}=how' for kind in known if kind != CHANNELS)}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        text = str(value)
        words = [part.split("=") if "=" in part else [CHANNELS, part] for part in text.split(",")]
        kinds = [kind for kind in self.known if kind != CHANNELS]
        for word in words:
            if len(word) != 2 or word[1] not in self.known.get(word[0], ()):
                each = "; ".join(f"{kind}= {', '.join(self.known[kind])}" for kind in kinds)
                spelled = word[1] if word[0] == CHANNELS else "=".join(word)
                self.fail(
                    f"{spelled!r}: expected {','.join(f'{kind}=HOW' for kind in kinds)} with {each}; or one of "
                    f"{', '.join(self.known[CHANNELS])} alone, of channels of MLPs and convolutions",
                    param,
                    ctx,
                )
        if len({word[0] for word in words}) != len(words):
            self.fail(f"{text!r}: expected {', '.join(f'{kind}=' for kind in kinds)} once each", param, ctx)
        return {word[0]: word[1] for word in words}


RANKING = ByKind(
    {
        "mlp": MLP_RANKINGS,
        "head": QK_RANKINGS,
        "conv": CONV_RANKINGS,
        "heads": HEADS_RANKINGS,
        CHANNELS: MLP_RANKINGS,
    }
)
REPAIR = ByKind({"mlp": MLP_REPAIRS, "conv": CONV_REPAIRS, "heads": HEADS_REPAIRS, CHANNELS: CHANNEL_REPAIRS})
