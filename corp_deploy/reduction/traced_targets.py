"""What a layer of a traced model is fitted to: what a stream lacks that its output is added to, or else its own output
in the dense model.

Legend: O outputs of the layer.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.program import RUN, SAME, SHAPED, operation
from corp_deploy.traced.programs.readers import LINEAR

from .traced_streams import Values, called

_SUMS = frozenset(("add", "add_"))
_EITHER, _FIRST = _SUMS | {"mul", "mul_"}, frozenset(("div", "batch_norm"))
_EVEN_REL = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """What is lacking of `wanted`, as the layer's output has it, in the stream's unit: `gain_O` times the layer's own,
    None for the same. `counts`: which places come to the stream at all [places], `read`: which the outputs read; None
    for all.
    """

    lacking: Tensor
    wanted: Tensor
    gain_O: Tensor | None = None
    counts: Tensor | None = None
    read: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`way`: ops that only move the layer's output and scale it, up to the sum `at` with what `other` gives; without
    these, or where one channel is scaled in different ways, the layer is fitted to its own dense output. `read_P`:
    which places of each input the outputs read, None for all.
    """

    layer: fx.Node
    way: tuple[fx.Node, ...] = ()
    at: fx.Node | None = None
    other: fx.Node | None = None
    read_P: Tensor | None = None

    @property
    def dense_ends(self) -> list[fx.Node]:
        """What the dense program has to be run up to."""
        return [each for each in (self.layer, self.at) if each is not None]

    @property
    def student_ends(self) -> list[fx.Node]:
        own = {self.layer, *self.way}
        beside = [each for node in self.way for each in node.all_input_nodes if each not in own]
        return [self.layer, *beside, *([] if self.other is None else [self.other])]

    def lacking(self, dense: Values, student: Values) -> Lacking:
        """Of a few inputs, by the values of both programs."""
        found = None if self.at is None else self._of_stream(dense[self.at], student)
        wanted = dense[self.layer]
        given = found or Lacking(lacking=wanted - student[self.layer], wanted=wanted)
        return given if self.read_P is None else replace(given, read=self.read_P.repeat(len(wanted)))

    def _of_stream(self, wanted: Tensor, student: Values) -> Lacking | None:
        own = student[self.layer]
        # torch says that there may be a third, which is asked for by has_aux alone.
        through, pulled = torch.func.vjp(self._through(student), own)  # type: ignore[misc]
        (gain,) = pulled(torch.ones_like(through))
        gain_XO = rows_of(gain, self.layer)
        counts_X = (gain_XO != 0.0).any(1)
        if not bool(counts_X.any()) or (self.layer.target is not LINEAR and not bool(counts_X.all())):
            return None
        gain_O = gain_XO[counts_X][0]
        if bool(((gain_XO[counts_X] - gain_O).abs() > _EVEN_REL * gain_O.abs()).any()):
            return None

        def back(x: Tensor) -> Tensor:
            """Moves alone undone: by what is pulled back is scaled once more."""
            return torch.where(gain == 0.0, 0.0, pulled(x)[0] / torch.where(gain == 0.0, 1.0, gain))

        assert self.other is not None, self
        return Lacking(
            lacking=back(wanted - student[self.other] - through),
            wanted=back(wanted),
            gain_O=gain_O,
            counts=None if bool(counts_X.all()) else counts_X,
        )

    def _through(self, values: Values) -> Callable[[Tensor], Tensor]:
        def through(own: Tensor) -> Tensor:
            here = values | {self.layer: own}
            for node in self.way:
                here[node] = called(node, here)
            given: Tensor = here[self.way[-1]] if self.way else own
            return given

        return through


def rows_of(x: Tensor, layer: fx.Node) -> Tensor:
    """What a layer gives, or something of its shape, by channel [places, O]."""
    return (x if layer.target is LINEAR else x.movedim(1, -1)).flatten(0, -2)


def target_of(layer: fx.Node, constants: Collection[fx.Node]) -> Target:
    """`constants`: nodes that no input's value reaches."""
    at, way = layer, list[fx.Node]()
    while True:
        users = [user for user in at.users if user not in constants]
        if len(users) != 1:
            return Target(layer=layer)
        (user,) = users
        others = [each for each in user.all_input_nodes if each is not at and each not in constants]
        if operation(user) in _SUMS and len(others) == 1 and len(user.args) == 2 and not user.kwargs:
            return Target(layer=layer, way=tuple(way), at=user, other=others[0])
        if others or not _is_passed(user, at):
            return Target(layer=layer)
        way.append(user)
        at = user


def _is_passed(user: fx.Node, at: fx.Node) -> bool:
    """Whether it does nothing but move elements, and scale and shift them by constants."""
    op, is_first = operation(user), user.args[0] is at
    is_alone = sum(each is at for each in user.args) == 1
    return is_alone and (op in _EITHER or (is_first and op in RUN | SAME | SHAPED | _FIRST))
