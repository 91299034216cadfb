"""The demo's examples: what is one model's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from corp_deploy.invocation.option import Pairs

SPARSITY = 0.5
CONV_SPARSITY = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A trained model among the digits, in `folder`, and how the demo reduces it.

    `demo_options`: what its command says of it; `reduce`: the options of reduce that settle the method; `method`: the
    same widths as fields of a Method, for presets that stand beside in `beside`; `narrower`: what is done, in words;
    `max_error`: of the outputs, for the proof.
    """

    folder: str
    title: str
    narrower: str
    reduce: Mapping[str, Any]
    method: Mapping[str, Any]
    beside: tuple[str, ...]
    max_error: float
    demo_options: Mapping[str, str] = field(default_factory=dict)


VIT = Example(
    folder="model",
    title="The digits example: dense against reduced",
    narrower="reducing to half the channels and head dimensions",
    reduce={"mlp": SPARSITY, "attn": SPARSITY, "align": Pairs(mlp=64, head=16)},
    method={"mlp_sparsity": SPARSITY, "attention_sparsity": SPARSITY},
    beside=("none",),
    max_error=0.05,
)
RESNET = Example(
    folder="resnet",
    title="The digits ResNet: dense against reduced",
    narrower="removing two fifths of the channels between convolutions",
    reduce={"conv": CONV_SPARSITY, "align": Pairs(conv=8)},
    method={"conv_sparsity": CONV_SPARSITY, "align_conv": 8},
    beside=("none", "grail"),
    max_error=0.1,
    demo_options={"example": "resnet"},
)
EXAMPLES: Mapping[str, Example] = MappingProxyType({"vit": VIT, "resnet": RESNET})
