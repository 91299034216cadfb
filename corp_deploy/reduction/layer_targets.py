"""Targets of a traced model's layers: the dense stream that a layer's output is added to, or its own dense output.

Legend: O outputs of the layer, X places of its output (tokens, or positions of a feature map).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from corp_deploy.algebra.norm_behind import NormBehind
from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, operation
from corp_deploy.traced.programs.readers import LINEAR

from .stream_walk import Values, call_node

_SUMS = frozenset(("add", "add_"))
_EITHER, _FIRST = _SUMS | {"mul", "mul_"}, frozenset(("div", "batch_norm"))
_EVEN_REL = 1e-4
_NORM_ARGS = (None, None, 1e-5)
"""The defaults of a layer norm's weight, bias and eps, where a program leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResidual:
    """A target and the residual to it, laid out like the layer's output, at the scale of the stream it is added to.

    The stream receives `gain_O` (None: 1) times the layer's output. `counts` masks the places that reach the stream
    [places], `read` those that the model's outputs read (None: all). `weights` are those of the places (None: equal).
    """

    residual: Tensor
    target: Tensor
    gain_O: Tensor | None = None
    counts: Tensor | None = None
    read: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassedOutput:
    """The result of ops that only move and scale a tensor's elements.

    `gain` is the scale of each element, 0 for elements that the ops drop; `pulled` computes the ops' vector-Jacobian
    product.
    """

    output: Tensor
    gain: Tensor
    pulled: Callable[[Tensor], tuple[Tensor, ...]]

    def back(self, x: Tensor) -> Tensor:
        """Move elements of the output's shape back to the input's places without scaling them; 0 for dropped ones."""
        return torch.where(self.gain == 0.0, 0.0, self.pulled(x)[0] / torch.where(self.gain == 0.0, 1.0, self.gain))


def _pass_through(first: fx.Node, own: Tensor, way: Sequence[fx.Node], values: Values) -> _PassedOutput:
    def through(own: Tensor) -> Tensor:
        here = values | {first: own}
        for node in way:
            here[node] = call_node(node, here)
        output: Tensor = here[way[-1]] if way else own
        return output

    # torch's types have a third result, which only has_aux asks for.
    output, pulled = torch.func.vjp(through, own)  # type: ignore[misc]
    return _PassedOutput(output=output, gain=pulled(torch.ones_like(output))[0], pulled=pulled)


def _channel_gain(rows_XO: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return each channel's gain and the mask [X] of places with a gain; None if no place has one, or they differ."""
    counts_X = (rows_XO != 0.0).any(1)
    if not bool(counts_X.any()):
        return None
    gain_O = rows_XO[counts_X][0]
    is_even = bool(((rows_XO[counts_X] - gain_O).abs() <= _EVEN_REL * gain_O.abs()).all())
    return (gain_O, counts_X) if is_even else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A layer's target: the dense value of the sum `at` that its output is added to, or its own dense output.

    `at` adds the layer's output, passed through the ops in `way`, to the output of `other`. The ops only move and scale
    elements. If there is no such sum, or one channel is scaled differently at different places, the layer is fitted to
    its own dense output. `norm`: a layer norm in front of `way`, with the ops `front` before it. `read_P`: the places
    that the model's outputs read, None for all.
    """

    layer: fx.Node
    front: tuple[fx.Node, ...] = ()
    norm: fx.Node | None = None
    way: tuple[fx.Node, ...] = ()
    at: fx.Node | None = None
    other: fx.Node | None = None
    read_P: Tensor | None = None

    @property
    def dense_ends(self) -> list[fx.Node]:
        """The nodes that the dense program has to compute."""
        before = None if self.norm is None else self.norm.all_input_nodes[0]
        return [each for each in (self.layer, self.at, before) if each is not None]

    @property
    def student_ends(self) -> list[fx.Node]:
        """The nodes that the student has to compute."""
        passed = [*self.front, *(() if self.norm is None else (self.norm,)), *self.way]
        beside = [each for node in passed for each in node.all_input_nodes if each not in {self.layer, *passed}]
        return [self.layer, *beside, *([] if self.other is None else [self.other])]

    def residual(self, dense: Values, student: Values) -> TargetResidual:
        """Return the residual of a few inputs, from the values of both programs."""
        found = None
        if self.at is not None and self.other is not None:
            dense_sum, beside = dense[self.at], student[self.other]
            if self.norm is None:
                found = self._of_stream(dense_sum, beside, student)
            else:
                found = self._before_norm(self.norm, dense[self.norm.all_input_nodes[0]], dense_sum, beside, student)
        target = dense[self.layer]
        result = found or TargetResidual(residual=target - student[self.layer], target=target)
        return result if self.read_P is None else replace(result, read=self.read_P.repeat(len(target)))

    def _of_stream(self, dense_sum: Tensor, beside: Tensor, student: Values) -> TargetResidual | None:
        passed = _pass_through(self.layer, student[self.layer], self.way, student)
        found = _channel_gain(output_rows(passed.gain, self.layer))
        if found is None or (self.layer.target is not LINEAR and not bool(found[1].all())):
            return None
        return TargetResidual(
            residual=passed.back(dense_sum - beside - passed.output),
            target=passed.back(dense_sum),
            gain_O=found[0],
            counts=None if bool(found[1].all()) else found[1],
        )

    def _before_norm(
        self, norm_node: fx.Node, source: Tensor, dense_sum: Tensor, beside: Tensor, student: Values
    ) -> TargetResidual | None:
        """Return the residual in front of the norm, with the norm's dense input `source` (see norm_behind.py)."""
        norm_args = (*norm_node.args[2:5], *_NORM_ARGS[len(norm_node.args) - 2 :])
        weight, eps = norm_args[0], norm_args[2]
        assert isinstance(eps, float), self
        front = _pass_through(self.layer, student[self.layer], self.front, student)
        normed = call_node(norm_node, student | {norm_node.all_input_nodes[0]: source})
        behind = _pass_through(norm_node, normed, self.way, student)
        found = _channel_gain(behind.gain.flatten(0, -2))
        if found is None or self.layer.target is not LINEAR:
            return None
        gain_C = found[0] * student[weight] if isinstance(weight, fx.Node) else found[0]
        norm = NormBehind(gain_C=gain_C, eps=eps)
        added = gain_C * F.layer_norm(source, source.shape[-1:], eps=eps)
        target = norm.before(added + behind.back(dense_sum - beside - behind.output), source)
        own = _channel_gain(output_rows(front.gain * front.back(gain_C.expand_as(source)), self.layer))
        if own is None:
            return None
        return TargetResidual(
            residual=front.back(target - gain_C * front.output),
            target=front.back(behind.back(dense_sum)),
            gain_O=own[0],
            counts=None if bool(own[1].all()) else own[1],
            weights=output_rows(front.back(norm.passed(source).unsqueeze(-1).expand_as(source)), self.layer).amax(1),
        )


def output_rows(x: Tensor, layer: fx.Node) -> Tensor:
    """Reshape a layer's output, or a tensor of the same shape, to [places, O]."""
    return (x if layer.target is LINEAR else x.movedim(1, -1)).flatten(0, -2)


def find_target(layer: fx.Node, constants: Collection[fx.Node]) -> Target:
    """Return a layer's target: the first sum that its output reaches as described in Target, else its own output.

    `constants`: nodes that don't depend on the model's inputs.
    """
    at, target = layer, Target(layer=layer)
    while True:
        users = [user for user in at.users if user not in constants]
        if len(users) != 1:
            return Target(layer=layer)
        (user,) = users
        others = [each for each in user.all_input_nodes if each is not at and each not in constants]
        if operation(user) in _SUMS and len(others) == 1 and len(user.args) == 2 and not user.kwargs:
            return replace(target, at=user, other=others[0])
        if target.norm is None and not others and _is_norm(user, at):
            target = replace(target, front=target.way, norm=user, way=())
        elif others or not _is_passed(user, at):
            return Target(layer=layer)
        else:
            target = replace(target, way=(*target.way, user))
        at = user


def _is_norm(user: fx.Node, at: fx.Node) -> bool:
    """Return whether an op is a layer norm over the channels of each token."""
    is_one = operation(user) == "layer_norm" and user.args[0] is at and not user.kwargs
    return is_one and isinstance(shape := user.args[1], list | tuple) and len(shape) == 1


def _is_passed(user: fx.Node, at: fx.Node) -> bool:
    """Return whether an op only moves elements, and scales and shifts them by constants."""
    op, is_first = operation(user), user.args[0] is at
    is_alone = sum(each is at for each in user.args) == 1
    return is_alone and (op in _EITHER or (is_first and op in RUN | SAME | SHAPED | _FIRST))
