"""A reduced decoder as transformers' own class has it, where its configuration can say the widths.

That is one MLP width for all layers, and of Llama and its like as many heads in as many groups in every layer, each as
wide as it was. Narrower heads would load there and be wrong: how fast planes turn is made anew from the head's width.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ground.errors import BadInput

from .decoder_checkpoint import state_to_transformers
from .decoder_config import architecture_from_transformers
from .family import sites_of
from .hf_saved import INSTEAD, Saved
from .text_decoder import DecoderArchitecture
from .widths import HeadWidths, Width, Widths

_HIDDEN = {"opt": "ffn_dim", "gpt2": "n_inner"}
_WITHOUT_HEADS = ("opt", "gpt2")


def hidden_entry(model_type: str) -> str:
    """The entry of their configuration that says how wide an MLP is."""
    return _HIDDEN.get(model_type, "intermediate_size")


def _unsayable_heads(name: str, width: HeadWidths, dense: DecoderArchitecture, kind: str) -> str:
    if width.qk != dense.head or width.v != dense.head:
        turned = "how fast positions turn them would be made anew from that width, and be wrong"
        why = turned if dense.rope else f"{kind} reads no width of them"
        return f"{name} has heads narrower than {dense.head}, and {why}"
    if (width.heads or dense.heads) != dense.heads and kind in _WITHOUT_HEADS:
        return f"{name} has {width.heads} heads, and {kind} makes their width of that number"
    return ""


def _unlike(name: str, count: int, first: tuple[str, int], what: str) -> str:
    if count != first[1]:
        return f"{name} has {count} {what} and {first[0]} {first[1]}, and a configuration has one number for all layers"
    return "" if count else f"{name} is a constant"


def refuse_unsayable(config: Mapping[str, Any], widths: Widths) -> None:
    """Raise BadInput, naming the first site, for widths that the configuration of this dense decoder can't say."""
    kind, dense = str(config["model_type"]), architecture_from_transformers(config, where="--save-as hf")
    heads = {name: width for name, width in widths.items() if isinstance(width, HeadWidths)}
    reasons = [_unsayable_heads(name, width, dense, kind) for name, width in heads.items()]
    counts = {name: width.heads or dense.heads for name, width in heads.items()}
    hidden = {name: width for name, width in widths.items() if isinstance(width, int)}
    for each, what in ((counts, "heads"), (hidden, "channels")):
        reasons += [_unlike(name, count, next(iter(each.items())), what) for name, count in each.items()]
    if reason := next(filter(None, reasons), ""):
        raise BadInput(f"--save-as hf: {reason}; {INSTEAD}")


def _said(config: Mapping[str, Any], hidden: int, heads: int, groups: int, head: int) -> dict[str, Any]:
    """The configuration with these widths."""
    kind = str(config["model_type"])
    own = {key: value for key, value in config.items() if key != "torch_dtype"}
    of_heads = {} if kind in _WITHOUT_HEADS else {"num_attention_heads": heads, "num_key_value_heads": groups}
    of_head = {"head_dim": head} if of_heads else {}
    return {**own, "dtype": "float32", hidden_entry(kind): hidden, **of_heads, **of_head}


def saved(decoder: nn.Module, config: Mapping[str, Any]) -> Saved:
    """The decoder as its class has it; `config` is the dense one's. Raises BadInput, naming the site, for widths that a
    configuration can't say, and for a bias that its class hasn't got.
    """
    every, kind = sites_of(decoder), str(config["model_type"])
    first, heads = every.channels[0], every.heads[0]
    of_heads: dict[str, Width] = {site.name: HeadWidths(qk=site.qk, v=site.v, heads=site.heads) for site in every.heads}
    refuse_unsayable(config, of_heads | {site.name: site.width for site in every.channels})
    _refuse_bias(every.linear, config)
    state = {name: tensor.detach().cpu() for name, tensor in decoder.state_dict().items()}
    tensors = state_to_transformers(state, heads.rows, len(every.channels), model_type=kind)
    return Saved(
        config=_said(config, first.width, heads.heads, heads.groups, heads.qk),
        state={name: tensor.clone().contiguous() for name, tensor in tensors.items()},
    )


def _refuse_bias(sites: tuple[Any, ...], config: Mapping[str, Any]) -> None:
    dense = architecture_from_transformers(config, where="--save-as hf")
    for site in sites:
        has = dense.mlp_bias if isinstance(site.width, int) else dense.proj_bias
        if site.last.bias is not None and not has:
            raise BadInput(f"--save-as hf: {site.name} got a bias, and its class has none there; {INSTEAD}")
