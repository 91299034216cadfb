"""Reduced encoders in transformers' own classes, where a configuration can set their widths.

Traced models keep the names of transformers' parameters, so a configuration describes a model if the class that is
built from it has parameters of the same shapes. Classes scale scores by the width of a head to the power -1/2; where
heads are narrower, the queries are scaled to make up for it.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from corp_deploy.traced.models.array_inputs import build_random_batch
from corp_deploy.traced.models.module import facts_of, traced_state, tracing
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Site
from corp_deploy.traced.models.values import TracedValues
from corp_deploy.traced.programs.readers import vocabulary_sizes
from ground.errors import BadInput

from .family import sites_of
from .hf_classes import build_class, class_of, config_from, library
from .hf_encoders import Arguments, plain_model

INSTEAD = "corp_deploy.load reads the directory that is written without --save-as, and its ONNX graph runs anywhere"
WHERE = "--save-as hf"
_MLP_ENTRIES = ("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner")
_RATIO, _HEAD = "mlp_ratio", "head_dim"
_INPUTS, _MOST_APART = 2, 1e-3


def refusal(reason: str) -> BadInput:
    """Return the error that a model can't be saved for transformers."""
    return BadInput(f"{WHERE}: {reason}; {INSTEAD}")


def _lost(name: str) -> str:
    return (
        f"the class has {name} too, which is only in the transformers directory that the model was read from; give "
        "--model hf:DIR for that one"
    )


def _dense_widths(model: nn.Module) -> dict[str, int]:
    cut, every = traced_state(model).cut, sites_of(model).every
    sizes = {} if cut is None else cut.sizes
    return {site.name: site.width * sizes.get(site.name, site.groups.size) // site.groups.size for site in every}


def _is_mlp(site: Site) -> bool:
    return not isinstance(site, TracedPairs | TracedValues)


def _mlp_options(values: Mapping[str, Any], width: int, dense: int) -> Iterator[dict[str, Any]]:
    if names := [name for name in _MLP_ENTRIES if values.get(name) == dense]:
        yield dict.fromkeys(names, width)
    ratio, hidden = values.get(_RATIO), values.get("hidden_size")
    if isinstance(ratio, float) and hidden:
        yield {_RATIO: width / hidden}
    elif ratio and hidden:  # gated MLPs are two thirds as wide as the ratio says
        yield from ({_RATIO: each} for each in range(max(width // hidden, 1), 2 * width // hidden + 2))


def _options(model: nn.Module, values: Mapping[str, Any], added: bool) -> Iterator[dict[str, Any]]:
    """Yield changes of a configuration that may describe the widths of a reduced model."""
    dense = _dense_widths(model)
    narrowed = [site for site in sites_of(model).every if site.width != dense[site.name]]
    mlp = next(filter(_is_mlp, narrowed), None)
    head = next((site.width // site.parts for site in narrowed if isinstance(site, TracedValues)), None)
    mlps = [{}] if mlp is None else list(_mlp_options(values, mlp.width, dense[mlp.name]))
    biases = {name: True for name, value in values.items() if value is False and name.endswith("bias")}
    for mlp_change, bias_change in product(mlps, ({}, biases) if added and biases else ({},)):
        yield {**mlp_change, **({} if head is None else {_HEAD: head}), **bias_change}


def _shapes(arguments: Arguments) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: each.shape for name, each in plain_model(arguments, where=WHERE).state_dict().items()}


def _unlike(
    shapes: Mapping[str, torch.Size], state: Mapping[str, Tensor], own: Mapping[str, Tensor], dense: Mapping[str, Any]
) -> str:
    """Return the first tensor of unlike shapes or in class or model only, biases of zeros aside; empty without any."""
    for name, shape in shapes.items():
        if name not in state and not (name.endswith("bias") and name not in dense):
            return name
        if name in state and state[name].shape != shape:
            return name
    return next((name for name in own if name.endswith(".bias") and name not in shapes), "")


def find_config_changes(model: nn.Module, arguments: Arguments, unread: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the changes of the dense configuration that describe the widths of a reduced model.

    `unread` has the dense model's tensors. Raises BadInput, naming the site, for widths that a configuration can't set.
    """
    values, dense = config_from(arguments.config, where=WHERE).to_dict(), _shapes(arguments)
    # A bias of zeros beside the dense model's was added for repairs and is unused.
    own = {name: each for name, each in model.state_dict().items() if name in dense or bool(each.any())}
    state = {**unread, **own}
    added = any(name.endswith(".bias") and name not in dense for name in own)
    if reason := next(_reasons(model, values, str(arguments.config.get("model_type"))), ""):
        raise refusal(reason)
    name = ""
    for changes in _options(model, values, added):
        shapes = _shapes(replace(arguments, config={**arguments.config, **changes}))
        if not (name := _unlike(shapes, state, own, dense)):
            return changes
    raise refusal(_last_reason(model, arguments, name, in_class=name in state))


def _reasons(model: nn.Module, values: Mapping[str, Any], kind: str) -> Iterator[str]:
    cut, every, dense = traced_state(model).cut, sites_of(model).every, _dense_widths(model)
    yield from (f"{name} is a constant" for name, kept in ({} if cut is None else cut.kept).items() if not len(kept))
    first = dict[int, Site]()
    for site in filter(_is_mlp, every):
        other = first.setdefault(dense[site.name], site)
        if other.width != site.width:
            yield (
                f"{site.name} is {site.width} wide and {other.name} {other.width}, and a configuration has one width "
                "for all layers"
            )
    yield from _reasons_of_heads([site for site in every if not _is_mlp(site)])
    hidden, ratio = values.get("hidden_size"), values.get(_RATIO)
    for site in filter(_is_mlp, every):
        if isinstance(ratio, int) and hidden and not any(values.get(name) for name in _MLP_ENTRIES):
            gated = "gated" in site.kind or values.get("use_swiglu_ffn")
            if site.width != dense[site.name] and not gated and site.width % hidden:
                yield f"{site.name} is {site.width} wide, and {kind}'s {_RATIO} is whole: multiples of {hidden} alone"


def _reasons_of_heads(sites: list[Site]) -> Iterator[str]:
    by_path, first = dict[str, dict[str, int]](), dict[str, tuple[str, int]]()
    for site in sites:
        path, _, part = site.name.rpartition(".")
        by_path.setdefault(path, {})[part] = site.dims if isinstance(site, TracedPairs) else site.width // site.parts
    for path, width in by_path.items():
        if len(width) == 2 and width["qk"] != width["v"]:
            both = f"queries and keys of {width['qk']} and values of {width['v']}"
            yield f"{path} has {both}, expected one width: --heads square"
        for part, own in width.items():
            other, its = first.setdefault(part, (path, own))
            if its != own:
                yield f"{path} has heads of {own} and {other} of {its}, expected one width for all layers"


def _last_reason(model: nn.Module, arguments: Arguments, name: str, *, in_class: bool) -> str:
    if not in_class and not name.endswith(".bias"):
        return _lost(name)
    kind = class_of(arguments.config, where=WHERE).__name__
    for site in sites_of(model).every:
        if name in {span.name for span in site.groups.spans}:
            dense = _dense_widths(model)[site.name]
            return f"{site.name} is {site.width} wide of {dense}, and {kind} has no entry for that width"
    return f"{name} has a shape or a bias that {kind} does not have"


def convert_encoder(
    model: nn.Module, arguments: Arguments, unread: Mapping[str, Tensor], whole: str | None = None
) -> nn.Module:
    """Return the reduced model in transformers' own class, whose outputs are the same on random inputs.

    `arguments` are the dense model's, `unread` has its tensors by its modules' names and its file's other tensors.
    `whole` is a class that holds the model and a head of training, whose tensors `unread` has. Raises BadInput, naming
    the site, for widths that a configuration can't set or the class reads differently.
    """
    changes = find_config_changes(model, arguments, unread)
    changed = replace(arguments, config={**arguments.config, **changes})
    with torch.device("cpu"):
        theirs = plain_model(changed, where=WHERE).eval()
    state = {**unread, **model.state_dict(), **_scaled(model, changes)}
    own = {name: state.get(name, torch.zeros_like(each)) for name, each in theirs.state_dict().items()}
    theirs.load_state_dict({name: each.detach().cpu().clone() for name, each in own.items()})
    _require_same(model, theirs)
    if whole is None:
        return _plain(theirs, changed)
    with torch.device("cpu"):
        outer = build_class(getattr(library(), whole), changed.config, {}, where=WHERE).eval()
    at = f"{outer.base_model_prefix}."
    outer.load_state_dict(
        {**{at + name: each for name, each in own.items()}, **_heads(outer, at, unread)}, strict=False
    )
    outer.tie_weights()  # type: ignore[operator]
    return outer


def _plain(theirs: nn.Module, arguments: Arguments) -> nn.Module:
    """Return a model of the class itself with the same weights, since save_pretrained writes the class's name."""
    with torch.device("meta"):
        kind = class_of(arguments.config, where=WHERE)
    plain = kind.__new__(kind)
    plain.__dict__ |= vars(theirs)
    return plain


def _heads(outer: nn.Module, at: str, unread: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `outer` outside of its base model. Raises BadInput for one that `unread` lacks."""
    named = dict(outer.named_parameters(remove_duplicate=False))
    at_hand = {id(each) for name, each in named.items() if name.startswith(at) or name in unread}
    if lost := [name for name, each in named.items() if id(each) not in at_hand]:
        raise refusal(_lost(lost[0]))
    return {name: unread[name] for name in named if name in unread and not name.startswith(at)}


def _scaled(model: nn.Module, changes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the queries' parameters, scaled for a class that divides scores by the narrower width of heads."""
    scaled = dict[str, Tensor]()
    if _HEAD not in changes:
        return scaled
    dense, state = _dense_widths(model), dict(model.named_parameters())
    for site in sites_of(model).every:
        if isinstance(site, TracedPairs) and site.repair.sides:
            factor = (site.width / dense[site.name]) ** 0.5
            names = [name for name in (site.repair.sides[0].weight, site.repair.sides[0].bias) if name]
            scaled |= {name: (state[name].double() * factor).to(state[name].dtype) for name in names if name in state}
    return scaled


def _require_same(model: nn.Module, theirs: nn.Module) -> None:
    own = tracing(model)
    ports = facts_of(model).spec.ports
    inputs = build_random_batch(ports, vocabulary_sizes(own.program), _INPUTS, torch.device("cpu"))
    parameters = [str(theirs.main_input_name), *(port.name for port in ports[1:])]
    with torch.inference_mode():
        expected: Any = model.cpu()(*inputs)
        actual: Any = theirs(**dict(zip(parameters, inputs, strict=True)))
    ours = expected[0] if isinstance(expected, tuple) else expected
    first = next(each for each in actual.values() if isinstance(each, Tensor))
    apart = float((first - ours).norm() / ours.norm())
    if not apart <= _MOST_APART:
        name = type(theirs).__name__
        raise refusal(f"{name} of transformers gives other outputs at these widths (relative error {apart:.2g})")
