"""Reduced decoders in the format of transformers' own classes, where a configuration can set their widths.

A configuration can set one MLP width for all layers and, of Llama and models like it, one number of heads and of groups
for all layers, with heads of the dense width. A model with narrower heads would load there and be wrong, since its
class computes the frequencies of rotary planes from the head's width.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Sites
from corp_deploy.traced.models.values import TracedValues

from .decoder import DecoderArchitecture
from .decoder_config import architecture_from_transformers, hidden_entry
from .decoder_names import state_to_transformers
from .family import sites_of
from .hf_saved import WHERE, refusal

_OF_HEADS = (".qk", ".v")
_WITHOUT_HEADS = ("opt", "gpt2")  # model types whose configurations have no width of heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The content of config.json and model.safetensors of a decoder in transformers' format."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def _refuse(reasons: Iterable[str]) -> None:
    if reason := next(filter(None, reasons), ""):
        raise refusal(reason)


def _refusal_of_heads(name: str, width: int, dense: DecoderArchitecture, kind: str) -> str:
    """Return why a configuration can't set this width of all heads' queries and keys, or values; empty if it can."""
    every, is_qk = dense.groups * dense.head // (2 if dense.rope else 1), name.endswith(".qk")
    if (width != every) if is_qk else (width % dense.head):
        rope_reason = "the frequencies of rotary positions would be computed from that width, and be wrong"
        why = rope_reason if dense.rope else f"{kind} reads no width of them"
        return f"{name} has heads narrower than {dense.head}, and {why}"
    heads = width // dense.head * dense.heads // dense.groups
    if not is_qk and heads != dense.heads and kind in _WITHOUT_HEADS:
        return f"{name} has {heads} heads, and {kind} computes their width from that number"
    return ""


def _refusal_beside(name: str, count: int, first: tuple[str, int], what: str) -> str:
    if count != first[1]:
        return f"{name} has {count} {what} and {first[0]} {first[1]}, and a configuration has one number for all layers"
    return "" if count else f"{name} is a constant"


def refuse_unsayable_widths(config: Mapping[str, Any], widths: Widths) -> None:
    """Raise BadInput, naming the first site, for widths that the configuration of this dense decoder can't set."""
    kind, dense = str(config["model_type"]), architecture_from_transformers(config, where=WHERE)
    reasons = [_refusal_of_heads(name, each, dense, kind) for name, each in widths.items() if name.endswith(_OF_HEADS)]
    values = {name: width // dense.head for name, width in widths.items() if name.endswith(".v")}
    mlps = {name: width for name, width in widths.items() if not name.endswith(_OF_HEADS)}
    for each, what in ((values, "heads with values of their own"), (mlps, "channels")):
        reasons += [_refusal_beside(name, count, next(iter(each.items())), what) for name, count in each.items()]
    _refuse(reasons)


def sayable_widths(config: Mapping[str, Any], sites: Sites, requested: Widths) -> Widths:
    """Return the width of each of a decoder's sites by name, in the form that `refuse_unsayable_widths` takes.

    Widths of queries and keys are those of all heads of the dense model, widths of narrower values those of one head,
    and the width of a constant is 0. `requested` has other widths for some of the sites.
    """
    dense = architecture_from_transformers(config, where=WHERE)
    widths = {f"blocks.{at}.{part}": 0 for at in range(dense.layers) for part in ("mlp", "attn.v")}
    for site in sites.every:
        width = requested.get(site.name, site.width)
        if isinstance(site, TracedPairs):
            width = width // len(site.groups_HP) * dense.groups
        elif isinstance(site, TracedValues) and site.width != site.parts * dense.head:
            width = site.width // site.parts
        widths[site.name] = width
    return widths


def convert_decoder(decoder: nn.Module, config: Mapping[str, Any]) -> Saved:
    """Return the decoder in transformers' format; `config` is the configuration of the dense decoder.

    Raises BadInput, naming the site, for widths that a configuration can't set, and for a bias that its class does not
    have.
    """
    kind, dense = str(config["model_type"]), architecture_from_transformers(config, where=WHERE)
    widths = sayable_widths(config, sites_of(decoder), {})
    refuse_unsayable_widths(config, widths)
    state = {name: tensor.detach().cpu() for name, tensor in decoder.state_dict().items()}
    has = {"attn.proj.bias": dense.proj_bias, "mlp.fc2.bias": dense.mlp_bias, "mlp.down.bias": dense.mlp_bias}
    added = (name for name in state if not has.get(name.split(".", 2)[-1], True))
    _refuse(f"{name} was added, and its class has none there" for name in added)
    groups = widths["blocks.0.attn.v"] // dense.head
    heads, changes = groups * dense.heads // dense.groups, {hidden_entry(kind): widths["blocks.0.mlp"]}
    if kind not in _WITHOUT_HEADS:
        changes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dense.head}
    rows = heads * dense.head, groups * dense.head, groups * dense.head
    own = {key: value for key, value in config.items() if key != "torch_dtype"}
    tensors = state_to_transformers(state, rows, kind)
    return Saved(
        config={**own, "dtype": "float32", **changes},
        state={name: tensor.clone().contiguous() for name, tensor in tensors.items()},  # files can't share memory
    )
