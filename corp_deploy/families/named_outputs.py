"""A model with several named outputs: the same layers, weights and sites by the same names, run step by step.

Legend: B inputs, N tokens, C channels.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from calib.inputs import Inputs
from ground.errors import BadInput
from ground.ports import OutputPort

from .maps import Grid, map_from_tokens
from .merging import Merging
from .outputs import Output, Outputs
from .steps import Outlet, Step, Walk
from .token_merging import unmerged

_BLOCK = re.compile(r"(?:blocks\.)?b?\d+(?:\.|$)")  # behind the name of a stage
# Tokens that are no place of the image, in front of those that are.
IN_FRONT = ("class", "distillation", "register")
_KINDS = {"class": "class", "registers": "register"}


class OwnFamily(Protocol):
    """As much of a family as a model with named outputs asks for; see family.py."""

    def steps(self, model: nn.Module) -> Iterator[Step]: ...
    def embedded(self, model: nn.Module, inputs: Inputs) -> Tensor: ...
    def token_weights(self, model: nn.Module, inputs: Inputs) -> Tensor | None: ...
    def normed(self, model: nn.Module, x_BNC: Tensor) -> Tensor: ...
    def finished(self, model: nn.Module, x_BNC: Tensor, inputs: Inputs, sources_BM: Tensor | None = None) -> Tensor: ...
    def token_kinds(self, model: nn.Module) -> tuple[str, ...]: ...
    def grid(self, model: nn.Module, layer: str) -> Grid | None: ...
    def merging_of(self, model: nn.Module) -> Merging | None: ...
    def classes(self, model: nn.Module) -> int: ...
    def input_spec(self, model: nn.Module) -> Any: ...
    def output_ports(self, model: nn.Module) -> tuple[OutputPort, ...]: ...


class NamedOutputs(nn.Module):
    """What stands before a model's own class in one with named outputs; `family` is the model's, `plain` its class."""

    family: ClassVar[OwnFamily]
    plain: ClassVar[type[nn.Module]]
    named_outputs: Outputs

    @property
    def ports(self) -> tuple[OutputPort, ...]:
        """What the model gives, in its order; of its head what that is for."""
        (own,) = self.family.output_ports(self)
        every = self.named_outputs.every
        return tuple(OutputPort(name=each.name, role=own.role) if each.part is None else each.port for each in every)

    @property
    def has_last_patches(self) -> bool:
        """Whether an output has a vector of the last stream for each place of the image."""
        steps = list(self.family.steps(self))
        every = (output for output in self.named_outputs.every if output.has_patches)
        return any(not output.layer or _last_of(output.layer, steps) == len(steps) - 1 for output in every)

    def steps(self) -> Iterator[Step]:
        """The model's, with an outlet behind each layer that an output stands behind."""
        steps = list(self.family.steps(self))
        last = {layer: _last_of(layer, steps) for layer in self.named_outputs.layers}
        for place, step in enumerate(steps):
            yield step
            yield from (Outlet(name=layer) for layer, end in last.items() if end == place)

    def answers(self, walk: Walk, inputs: Inputs) -> tuple[Tensor, ...]:
        """The outputs for what is behind the last step, without those behind layers at whose outlets the walk
        wasn't.
        """
        kept = {name for name, _ in walk.kept}
        every = (output for output in self.named_outputs.every if not output.layer or output.layer in kept)
        return tuple(self._answer(output, walk, inputs) for output in every)

    def _answer(self, output: Output, walk: Walk, inputs: Inputs) -> Tensor:
        if output.part is None:
            return self.family.finished(self, walk.tokens.x, inputs, walk.tokens.sources)
        tokens = dict(walk.kept)[output.layer] if output.layer else walk.tokens
        # Tokens that are no patch stand in front, where none is merged.
        x_BNC = tokens.x if tokens.sources is None or not output.has_patches else unmerged(tokens.x, tokens.sources)
        normed_BNC = self.family.normed(self, x_BNC) if output.normed else x_BNC
        part = _part(output, normed_BNC, self.family.token_kinds(self))
        if output.part != "map":
            return part
        grid = self.family.grid(self, _own_layer(output.layer, list(self.family.steps(self))))
        assert grid is not None, output
        return map_from_tokens(part, grid)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One output bare, several as a tuple."""
        walk = Walk.of(self.family.embedded(self, images), self.family.token_weights(self, images))
        for step in self.steps():
            walk = walk.behind(step)
        answers = self.answers(walk, images)
        return answers if len(answers) > 1 else answers[0]


def _inside(layer: str, steps: list[Step]) -> list[int]:
    return [place for place, step in enumerate(steps) if f"{step.name}.".startswith(f"{layer}.")]


def _own_layer(layer: str, steps: list[Step]) -> str:
    """The layer as the model calls it: layer1 is one of several layers or has that very name; what some call stages
    others call layers, layer1 or s1.
    """
    word, _, number = layer.partition(".")
    names = [layer, f"{word.removesuffix('s')}{number}"]
    if word == "stages":
        names += [f"layers.{number}", f"layer{number}", f"s{number}"]
    return next((name for name in names if _inside(name, steps)), layer)


def _is_stage(layer: str, steps: list[Step]) -> bool:
    """Whether the layer is one of several blocks, by their names."""
    own = _own_layer(layer, steps)
    return any(_BLOCK.match(steps[place].name.removeprefix(f"{own}.")) for place in _inside(own, steps))


def _last_of(layer: str, steps: list[Step]) -> int:
    """The place of a layer's last step; -1 for a layer that no step is of."""
    return max(_inside(_own_layer(layer, steps), steps), default=-1)


def _part(output: Output, x_BNC: Tensor, kinds: tuple[str, ...]) -> Tensor:
    front = sum(kind in IN_FRONT for kind in kinds)
    if output.part == "tokens":
        return x_BNC
    if output.part in ("patches", "map"):
        return x_BNC[:, front:]
    assert output.part is not None, output
    kind = _KINDS[output.part]
    first, count = kinds.index(kind), kinds.count(kind)
    return x_BNC[:, first] if output.part == "class" else x_BNC[:, first : first + count]


def _layers(steps: list[Step]) -> list[str]:
    """Names of outputs behind the model's layers: blocks.3.mlp is of block3, stages.1.blocks.0.mlp of stage1,
    layer1.0.conv1 of layer1.
    """
    parts = [part for step in steps if len(part := step.name.split(".")) > 1]
    counted = (part[0] if part[0][-1].isdigit() else f"{part[0].removesuffix('s')}{part[1]}" for part in parts)
    return list(dict.fromkeys(counted))


def _refusal(output: Output, model: nn.Module, family: OwnFamily, steps: list[Step]) -> str:
    """Why the model has no such output, or nothing."""
    kinds = family.token_kinds(model)
    if output.part is None:
        return refusal_of_head(output, family.classes(model))
    if (kind := _KINDS.get(output.part)) is not None and kind not in kinds:
        known = f"its tokens are {', '.join(dict.fromkeys(kinds))}" if kinds else "none of its tokens are known"
        return f"the model has no {kind} token; {known}"
    if output.layer and _last_of(output.layer, steps) < 0:
        return f"the model has no such layer; it has {', '.join(_layers(steps))}"
    stays = output.layer.startswith("stages.") or _last_of(output.layer, steps) < len(steps) - 1
    if output.layer and output.normed and stays and _is_stage(output.layer, steps):
        return "a stage's channels aren't those of the last norm"
    return _refusal_of_places(output, model, family, steps) if output.has_patches else ""


def refusal_of_head(output: Output, classes: int) -> str:
    """Why the head of a model of so many classes doesn't give this, or nothing."""
    if output.name == "logits" and not classes:
        return "the model has no classifier; its head gives pooled"
    if output.name == "pooled" and classes:
        return "the model's head gives logits; pooled is of one built with num_classes 0"
    return ""


def _refusal_of_places(output: Output, model: nn.Module, family: OwnFamily, steps: list[Step]) -> str:
    """Why what the output gives is in no order of the image, or makes no map."""
    try:
        grid = family.grid(model, _own_layer(output.layer, steps))
    except BadInput as error:
        return str(error)
    return "the model's tokens make no map" if output.part == "map" and grid is None else ""


def _refuse_misfit(model: nn.Module, family: OwnFamily, outputs: Outputs) -> None:
    if family.input_spec(model).medium != "images":
        raise BadInput("outputs: those of text encoders have no names to choose from; leave --outputs away")
    steps = list(family.steps(model))
    for output in outputs.every:
        if reason := _refusal(output, model, family, steps):
            raise BadInput(f"outputs: {output.name}: {reason}")
    last = max(_last_of(output.layer, steps) if output.layer else len(steps) - 1 for output in outputs.every)
    if last < len(steps) - 1:
        raise BadInput(
            f"outputs: {outputs.words()} leave out what comes behind {steps[last].name}, which would be reduced for "
            "nothing; add class, patches or the last layer"
        )
    merging = family.merging_of(model)
    if merging is not None and (reason := merging_refusal(merging.how, outputs)):
        raise BadInput(f"outputs: {reason}")


def merging_refusal(how: str, outputs: Outputs) -> str:
    """Why tokens can't be merged away so beside these outputs, or nothing: merged ones are given back to each
    source.
    """
    if how == "drop" and outputs.has_patches:
        return f"{outputs.words()} have a vector for each patch, and those that were dropped have none; merge instead"
    return ""


def named(model: nn.Module, family: OwnFamily, outputs: Outputs | None) -> nn.Module:
    """A copy of the model that gives these outputs, its own alone for None. Raises BadInput for what it hasn't got."""
    plain = model.plain if isinstance(model, NamedOutputs) else type(model)
    if outputs is None:
        kind, own = plain, {}
    else:
        _refuse_misfit(model, family, outputs)
        # The family knows its models by their class, and modules by their names: both stay.
        kind = type(plain.__name__, (NamedOutputs, plain), {"family": family, "plain": plain})
        own = {"named_outputs": outputs}
    copied = kind.__new__(kind)
    copied.__dict__ |= copy.deepcopy({key: value for key, value in vars(model).items() if key != "named_outputs"}) | own
    return copied
