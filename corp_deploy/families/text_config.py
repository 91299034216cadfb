"""Text models as transformers configures them: what of a config.json is read, by the names that most kinds have.

Nothing is executed: a configuration is typed and bounded where it is read, and what has no place here is refused.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec

from ground.errors import BadInput

from .text_encoder import ACTIVATIONS, Eps, Heads, Layers, Rows, TextArchitecture, Width


class CommonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What models of text and of images have."""

    model_type: str
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    hidden_act: str
    layer_norm_eps: Eps
    auto_map: Any = None
    quantization_config: Any = None
    pruned_heads: Any = None

    def refused(self, activations: Collection[str]) -> dict[str, bool]:
        """Why a model can't be built here, each with whether it holds."""
        return {
            "it comes with code of its own (auto_map), which is never run": bool(self.auto_map),
            "it is quantised; give the weights before that": self.quantization_config is not None,
            "some of its heads are removed already": bool(self.pruned_heads),
            f"its activation is {self.hidden_act!r:.60}, expected {', '.join(activations)}": (
                self.hidden_act not in activations
            ),
        }


class TextConfig(CommonConfig, frozen=True, kw_only=True):
    """What encoders and decoders have. `common`: by a kind's own names of entries most kinds'; `fixed`: what stands in
    its code.
    """

    common: ClassVar[Mapping[str, str]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}

    vocab_size: Rows
    intermediate_size: Width
    max_position_embeddings: Rows

    def reasons(self) -> dict[str, bool]:
        return self.refused(ACTIVATIONS)

    def architecture(self) -> TextArchitecture:
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, Any]:
        """By the names of an architecture."""
        return {
            "vocabulary": self.vocab_size,
            "positions": self.max_position_embeddings,
            "width": self.hidden_size,
            "heads": self.num_attention_heads,
            "hidden": self.intermediate_size,
            "layers": self.num_hidden_layers,
            "activation": self.hidden_act,
            "eps": self.layer_norm_eps,
        }


def architecture_from(
    config: Mapping[str, Any], kinds: Mapping[str, type[TextConfig]], *, where: str, noun: str
) -> TextArchitecture:
    """The model that a config.json of transformers describes. Raises BadInput for another kind of model, and for what
    none here can do.
    """
    name = config.get("model_type")
    if name not in tuple(kinds):
        raise BadInput(f"{where}: model_type is {name!r:.60}, expected one of {', '.join(kinds)}")
    common = kinds[name].common
    own = {common.get(key, key): value for key, value in config.items() if key in common or key not in common.values()}
    try:
        read = msgspec.convert({**own, **kinds[name].fixed}, kinds[name])
        if reason := next((reason for reason, holds in read.reasons().items() if holds), ""):
            raise BadInput(f"{where}: this {name} can't be built: {reason}")
        return read.architecture()
    except BadInput:
        raise
    except ValueError as error:  # msgspec's own are ValueErrors too
        words = str(error)[:300]
        for theirs, ours in common.items():
            words = words.replace(f"$.{ours}", f"$.{theirs}").replace(f"`{ours}`", f"`{theirs}`")
        raise BadInput(f"{where}: not the configuration of a {name} {noun}: {words}") from None
