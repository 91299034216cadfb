"""Names of a model's outputs: those of its head, tokens of its last stream, and streams behind its layers.

The grammar of a name: `logits` or `pooled`; `class`, `registers`, `patches` or `tokens` behind the last norm; `block8`
for the patch tokens right behind block 8, `block8_class` and so on for others of its tokens, and `block8_norm` for the
same through the model's last norm. `map`, `block8_map` and `stage1_map` are patch tokens as a map [B,C,H,W], rows and
columns as in the image. Layers count from 0, as their names in the model do.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ground.errors import BadInput
from ground.ports import OutputPort
from ground.quantity import quoted

Part = Literal["class", "registers", "patches", "tokens", "map"]
PARTS: tuple[Part, ...] = ("class", "registers", "patches", "tokens", "map")
HEADS = ("logits", "pooled")
MOST_OUTPUTS = 64
_LAYER = re.compile(r"([a-z]+)(0|[1-9][0-9]{0,3})(?:_(class|registers|patches|tokens|map))?(_norm)?")
EXAMPLE = "class,patches,block8"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOutput:
    """An output that is asked for by name, of the layer with path `layer`: empty for the last stream or the head.

    `part`: the tokens that it has, None for an output of the head. `normed`: read behind the model's last norm.
    """

    name: str
    part: Part | None
    layer: str = ""
    normed: bool = True

    @property
    def has_patches(self) -> bool:
        """True if the output includes the patch tokens: its part is `patches`, `tokens` or `map`."""
        return self.part in ("patches", "tokens", "map")

    @property
    def port(self) -> OutputPort:
        """The port, with the role embedding for the class token, else feature map; not for outputs of the head."""
        assert self.part is not None, self.name
        return OutputPort(name=self.name, role="embedding" if self.part == "class" else "feature map")


def output_from_name(name: str) -> NamedOutput:
    """Parse an output's name; raise BadInput for an unknown one."""
    if name in HEADS:
        return NamedOutput(name=name, part=None)
    if name in PARTS:
        return NamedOutput(name=name, part=name)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise BadInput(
            f"outputs: got {quoted(name)}, expected {', '.join((*HEADS, *PARTS))}, or a layer such as block8, "
            "block8_class, block8_norm, stage1_map"
        )
    word, number, part, norm = match.groups()
    of_layer: Part = next((each for each in PARTS if each == part), "patches")
    return NamedOutput(name=name, part=of_layer, layer=f"{word}s.{number}", normed=norm is not None)


@dataclass(frozen=True, slots=True)
class NamedOutputs:
    """One to 64 outputs that are asked for by name, in order; raises BadInput for unknown or repeated names."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.names) <= MOST_OUTPUTS:
            raise BadInput(f"outputs: got {len(self.names)}, expected 1 to {MOST_OUTPUTS} names, such as {EXAMPLE}")
        twice = [name for name in dict.fromkeys(self.names) if self.names.count(name) > 1]
        if twice:
            raise BadInput(f"outputs: got {', '.join(twice)} twice, expected each name once")
        _ = self.every

    @property
    def every(self) -> tuple[NamedOutput, ...]:
        return tuple(output_from_name(name) for name in self.names)

    @property
    def has_patches(self) -> bool:
        return any(output.has_patches for output in self.every)

    def describe(self) -> str:
        return ", ".join(self.names)


def outputs_from_text(text: str) -> NamedOutputs:
    """Parse comma-separated names, such as `class,patches,block8`; raise BadInput for unknown or repeated ones."""
    return NamedOutputs(tuple(part.strip() for part in text.split(",")))
