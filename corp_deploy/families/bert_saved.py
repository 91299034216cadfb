"""A reduced text encoder as transformers' own class has it, where its configuration can say the widths.

That is one MLP width for all layers; none of these classes reads a width of heads.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ground.errors import BadInput

from .bert_checkpoint import NAMES, architecture_from_transformers, hidden_entry
from .family import sites_of
from .hf_saved import INSTEAD, Saved
from .text_encoder import EncoderArchitecture
from .transformers_names import state_to
from .widths import Width, Widths

_OF_HEADS = (".qk", ".v")


def _unsayable(name: str, width: Width, first: tuple[str, Width], dense: EncoderArchitecture, kind: str) -> str:
    if name.endswith(_OF_HEADS):
        return (
            "" if width == dense.width else f"{name} is {width} wide of {dense.width}, and {kind} reads no such width"
        )
    if width != first[1]:
        return f"{name} is {width} wide and {first[0]} {first[1]}, and a configuration has one width for all layers"
    return ""


def _first_mlp(widths: Widths) -> tuple[str, Width]:
    return next((name, width) for name, width in widths.items() if not name.endswith(_OF_HEADS))


def refuse_unsayable(config: Mapping[str, Any], widths: Widths) -> None:
    """Raise BadInput, naming the first site, for widths that the configuration of this dense encoder can't say."""
    kind, dense = str(config["model_type"]), architecture_from_transformers(config, where="--save-as hf")
    reasons = (_unsayable(name, width, _first_mlp(widths), dense, kind) for name, width in widths.items())
    if reason := next(filter(None, reasons), ""):
        raise BadInput(f"--save-as hf: {reason}; {INSTEAD}")


def saved(
    encoder: nn.Module, config: Mapping[str, Any], prefix: str, unread: Mapping[str, Tensor] = MappingProxyType({})
) -> Saved:
    """The encoder as its class has it; `config` is the dense one's, `prefix` the name of the encoder in its class,
    `unread` what its file had beside the encoder, by its names there: a pooler, heads of a task.

    Raises BadInput, naming the site, for widths that a configuration can't say.
    """
    kind, widths = str(config["model_type"]), {site.name: site.width for site in sites_of(encoder).every}
    refuse_unsayable(config, widths)
    state = {name: tensor.detach().cpu() for name, tensor in encoder.state_dict().items()}
    dense = architecture_from_transformers(config, where="--save-as hf")
    tensors = state_to(state, NAMES[kind], (dense.width,) * 3, dense.layers)
    own = {key: value for key, value in config.items() if key != "torch_dtype"}
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    return Saved(
        config={**own, "dtype": "float32", hidden_entry(kind): _first_mlp(widths)[1]},
        state={name: tensor.clone().contiguous() for name, tensor in {**unread, **named}.items()},
    )
