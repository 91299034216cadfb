"""Named outputs of transformers' vision models: tokens and maps of the last hidden state and after layers.

Legend: B images, N tokens, first those of special kinds, then P patches, C channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from corp_deploy.spec.outputs import NamedOutput, NamedOutputs
from corp_deploy.traced.models.module import TracedModule, facts_of, traced_module, traced_state
from ground.errors import BadInput

from .hf_encoders import called_of, facts_in_transformers
from .plain_module import copy_with_forward
from .timm_maps import refusal_of_part, tokens_of_kind

_FRONT = {
    "cls_token": "class",
    "class_embedding": "class",
    "distillation_token": "distillation",
    "register_tokens": "register",
}
"""The kinds of tokens in front of patches, by the parameters that they start as, in their order in the sequence."""
_NORMS = ("layernorm", "norm", "post_layernorm")


@dataclass(frozen=True, slots=True)
class _Tower:
    """The model without its head, and the layout of its tokens."""

    base: nn.Module
    kinds: tuple[str, ...]  # the kind of each token in front of the patches
    grid: tuple[int, int]  # the numbers of rows and columns of patches
    own: str  # the name of the model's own output

    @property
    def layers(self) -> nn.ModuleList:
        return next(each for each in self.base.modules() if isinstance(each, nn.ModuleList))

    @property
    def norm(self) -> nn.Module | None:
        """The norm after the last layer, if the model has one."""
        named = {name.rpartition(".")[2]: each for name, each in self.base.named_modules() if ".layer" not in name}
        return next((named[name] for name in _NORMS if name in named), None)

    def tensor(self, output: NamedOutput, x_BNC: Tensor) -> Tensor:
        """Return the part of the tokens [B,N,C] that `output` names: all, the patches, their map, or one kind."""
        if output.part == "tokens":
            return x_BNC
        if output.part in ("patches", "map"):
            patches_BPC = x_BNC[:, len(self.kinds) :]
            return patches_BPC.mT.unflatten(2, self.grid) if output.part == "map" else patches_BPC
        return tokens_of_kind(output, x_BNC, self.kinds)

    def refusal(self, output: NamedOutput) -> str:
        """Return why the model can't give `output`; empty if it can."""
        if output.part is None:
            ours = "logits" if self.own == "logits" else "pooled"
            return "" if output.name == ours else f"the model's head gives {ours}"
        if output.layer and not (output.layer.startswith(("blocks.", "layers.")) and _place(output) < len(self.layers)):
            return f"the model has no such layer; it has block0 to block{len(self.layers) - 1}"
        return refusal_of_part(output, self.kinds, has_norm=self.norm is not None)


def _place(output: NamedOutput) -> int:
    return int(output.layer.rpartition(".")[2])


def _read_tower(model: nn.Module) -> _Tower:
    """Return a model's tower. Raises BadInput for a model that has no patches of images."""
    base: Any = model.base_model
    config, (_, *sides) = base.config, facts_of(model).spec.shape
    patch, own = getattr(config, "patch_size", None), facts_of(model).outputs[0].name
    if len(sides) != 2 or patch is None or not any(isinstance(each, nn.ModuleList) for each in base.modules()):
        raise BadInput(f"outputs: {type(model).__name__} has no patches; leave --outputs out")
    patches = patch if isinstance(patch, list | tuple) else (patch, patch)
    counts = {name.rpartition(".")[2]: each for name, each in base.named_parameters()}
    kinds = [
        kind
        for name, kind in _FRONT.items()
        if name in counts
        for _ in range(counts[name].shape[1] if counts[name].dim() == 3 else 1)
    ]
    return _Tower(base, tuple(kinds), (sides[0] // patches[0], sides[1] // patches[1]), own)


def with_named_tokens(model: TracedModule, outputs: NamedOutputs) -> TracedModule:
    """Return a copy of a dense vision model of transformers that gives these outputs: its own, tokens, and maps.

    Raises BadInput for an output that the model does not have.
    """
    facts, tower = facts_of(model), _read_tower(model)
    for output in outputs.every:
        if reason := tower.refusal(output):
            raise BadInput(f"outputs: {output.name}: {reason}")
    called = called_of(traced_state(model).plain)

    def forward(self: Any, **inputs: Tensor) -> Mapping[str, Tensor]:
        running, streams = replace(tower, base=self.base_model), dict[int, Any]()
        watched = dict(enumerate(running.layers)) | ({} if running.base is self else {-1: running.base})
        handles = [each.register_forward_hook(partial(_keep, streams, place)) for place, each in watched.items()]
        raw = called.raw_outputs(self, inputs)
        for handle in handles:
            handle.remove()
        last = streams.get(-1, raw).last_hidden_state
        if self.config.model_type == "clip_vision_model":  # its class applies the norm to the pooled token alone
            assert running.norm is not None
            last = running.norm(last)
        tensors = dict[str, Tensor]()
        for output in outputs.every:
            if output.part is None:
                tensors[output.name] = called.answer(raw, inputs)[tower.own]
                continue
            x_BNC = last
            if output.layer:
                behind = streams[_place(output)]
                x_BNC = behind[0] if isinstance(behind, tuple) else behind
                x_BNC = running.norm(x_BNC) if output.normed and running.norm is not None else x_BNC
            tensors[output.name] = tower.tensor(output, x_BNC)
        return tensors

    plain = copy_with_forward(model, forward)
    named = facts_in_transformers(plain, facts.spec, [str(tower.base.main_input_name)])
    ports = tuple(
        replace(port, role=facts.outputs[0].role if output.part is None else output.port.role)
        for port, output in zip(named.outputs, outputs.every, strict=True)
    )
    classes = facts.classes if "logits" in outputs.names else 0
    return traced_module(plain, replace(named, outputs=ports, classes=classes, named=outputs))


def _keep(streams: dict[int, Any], place: int, module: nn.Module, arguments: Any, outputs: Any) -> None:
    streams[place] = outputs
