"""A reduced decoder as transformers' own class has it, where its configuration can say the widths.

That is one MLP width for all layers, and of Llama and its like as many heads in as many groups in every layer, each as
wide as it was. Narrower heads would load there and be wrong: how fast planes turn is made anew from the head's width.
None of the encoders' classes reads a width of heads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Sites
from corp_deploy.traced.models.values import TracedValues

from .decoder_config import architecture_from_transformers
from .decoder_model import DecoderArchitecture
from .decoder_names import hidden_entry, state_to_transformers
from .family import sites_of
from .hf_saved import refused

_OF_HEADS = (".qk", ".v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The content of config.json and model.safetensors."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def _of_mlps(widths: Widths) -> dict[str, int]:
    return {name: width for name, width in widths.items() if not name.endswith(_OF_HEADS)}


def _refuse(reasons: Iterable[str]) -> None:
    if reason := next(filter(None, reasons), ""):
        raise refused(reason)


_WITHOUT_HEADS = ("opt", "gpt2")


def _unsayable_heads(name: str, width: int, dense: DecoderArchitecture, kind: str) -> str:
    """Of queries and keys, or values, of all heads; those that are left being as wide as they were."""
    every, is_qk = dense.groups * dense.head // (2 if dense.rope else 1), name.endswith(".qk")
    if (width != every) if is_qk else (width % dense.head):
        rope_reason = "how fast positions turn them would be made anew from that width, and be wrong"
        why = rope_reason if dense.rope else f"{kind} reads no width of them"
        return f"{name} has heads narrower than {dense.head}, and {why}"
    heads = width // dense.head * dense.heads // dense.groups
    if not is_qk and heads != dense.heads and kind in _WITHOUT_HEADS:
        return f"{name} has {heads} heads, and {kind} makes their width of that number"
    return ""


def _unlike(name: str, count: int, first: tuple[str, int], what: str) -> str:
    if count != first[1]:
        return f"{name} has {count} {what} and {first[0]} {first[1]}, and a configuration has one number for all layers"
    return "" if count else f"{name} is a constant"


def refuse_unsayable(config: Mapping[str, Any], widths: Widths) -> None:
    """Raise BadInput, naming the first site, for widths that the configuration of this dense decoder can't say."""
    kind, dense = str(config["model_type"]), architecture_from_transformers(config, where="--save-as hf")
    reasons = [_unsayable_heads(name, each, dense, kind) for name, each in widths.items() if name.endswith(_OF_HEADS)]
    values = {name: width // dense.head for name, width in widths.items() if name.endswith(".v")}
    for each, what in ((values, "heads with values of their own"), (_of_mlps(widths), "channels")):
        reasons += [_unlike(name, count, next(iter(each.items())), what) for name, count in each.items()]
    _refuse(reasons)


def sayable_widths(config: Mapping[str, Any], sites: Sites, requested: Widths) -> Widths:
    """Of a decoder with these sites, some of other widths, as `refuse_unsayable` has it: of queries and keys as if all
    heads were there; of values that are narrower now those of one head. Of a constant 0.
    """
    dense = architecture_from_transformers(config, where="--save-as hf")
    widths = {f"blocks.{at}.{part}": 0 for at in range(dense.layers) for part in ("mlp", "attn.v")}
    for site in sites.every:
        width = requested.get(site.name, site.width)
        if isinstance(site, TracedPairs):
            width = width // len(site.groups_HP) * dense.groups
        elif isinstance(site, TracedValues) and site.width != site.parts * dense.head:
            width = site.width // site.parts
        widths[site.name] = width
    return widths


def saved(decoder: nn.Module, config: Mapping[str, Any]) -> Saved:
    """The decoder as its class has it; `config` is the dense one's. Raises BadInput, naming the site, for widths that a
    configuration can't say, and for a bias that its class hasn't got.
    """
    kind, dense = str(config["model_type"]), architecture_from_transformers(config, where="--save-as hf")
    widths = sayable_widths(config, sites_of(decoder), {})
    refuse_unsayable(config, widths)
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
    tensors = state_to_transformers(state, rows, dense.layers, kind)
    return Saved(
        config={**own, "dtype": "float32", **changes},
        state={name: tensor.clone().contiguous() for name, tensor in tensors.items()},  # which share no memory
    )
