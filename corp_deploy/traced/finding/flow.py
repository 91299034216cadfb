"""The state of a walk through a program: labels that are joined or must stay, and the uses of weights, call by call."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from corp_deploy.traced.programs.program import Program, module_of, named_arguments, operation, sizes_at_one

from .labels import FIXED, Groups, LabelTensor, compact, first_along, meeting_pairs, place_along, tidy, varying
from .site_groups import SiteGroups

Value = Any
"""A node's value: a LabelTensor, a tuple of them, or the number that it gives at a batch of 1."""


@dataclass(frozen=True, slots=True)
class Call:
    """A node's call: values of all nodes before it, arguments by name, and the result's shape at a batch of 1."""

    node: fx.Node
    values: Mapping[fx.Node, Value]
    arguments: dict[str, Any]
    shape: Any

    @property
    def op(self) -> str:
        return operation(self.node)

    @property
    def where(self) -> str:
        """The op and its module, for messages."""
        path, kind = module_of(self.node)
        return f"{self.op} in {path or 'the model'}{f' ({kind})' * bool(kind)}"

    def because(self, what: str, marks: LabelTensor) -> str:
        """Return the reason why labels stay that meet the unlabelled tensor `marks`, with the tensor's own reason."""
        return f"{self.where} {what} a tensor that can't be narrowed: {marks.why.rpartition(': ')[2]}"

    def __getitem__(self, name: str) -> Any:
        """Return an argument with values in place of nodes."""
        return self.valued(self.arguments.get(name))

    def valued(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda node: self.values[node])

    @property
    def tensors(self) -> list[LabelTensor]:
        entering = (self.values[node] for node in self.node.all_input_nodes)
        return [each for each in entering if isinstance(each, LabelTensor)]


def make_call(node: fx.Node, values: Mapping[fx.Node, Value]) -> Call:
    return Call(node, values, named_arguments(node), sizes_at_one(node))


Role = Literal["writes", "reads", "between", "sums", "pairs"]
MOST_ELEMENTS = 4_000_000
"""The largest constant whose elements get labels of their own when an op moves them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Use:
    """The labels [the sizes of `axes`] of a tensor where a node uses it.

    `name` is a parameter or constant whose rows the node `writes` or whose columns it `reads`, or that it takes element
    by element `between` writers and readers. Or `name` is a node whose result it `sums` over with weights, or `pairs`
    with another tensor element by element before it sums, as queries with keys.
    """

    node: fx.Node
    name: str
    axes: tuple[int, ...]
    labels: Tensor
    role: Role

    @property
    def is_of_constant(self) -> bool:
        return self.role not in ("sums", "pairs")


@dataclass(slots=True)
class Flow:
    """The findings of a walk through a program: values and uses by node, and groups of labels that are joined or stay.

    `keeps_all`: elements are reordered, none is removed, so that a norm over channels joins none. `inside`: pairs of a
    label and one that it holds, as a head holds its dimensions; a holder goes if and only if all that it holds goes.
    `lumps`: labels that an op mixes, with the reason. `multiplied`, `added`, `summed`: labels that meet in a product or
    a sum, and those that attention weights sum up. `unknown`: ops without a rule that labels met.
    """

    program: Program
    keeps_all: bool = False
    values: dict[fx.Node, Value] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)
    inside: list[Tensor] = field(default_factory=list)
    lumps: list[tuple[Tensor, str]] = field(default_factory=list)
    multiplied: list[Tensor] = field(default_factory=list)
    added: list[Tensor] = field(default_factory=list)
    summed: list[Tensor] = field(default_factory=list)
    uses: dict[fx.Node, list[Use]] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    times_used: Counter[str] = field(default_factory=Counter)
    _axes: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def fresh(self, sizes: Sequence[int]) -> Tensor:
        """Create labels of these sizes."""
        return self.groups.add(math.prod(sizes)).reshape(tuple(sizes))

    def renewed(self, value: Value) -> Value:
        """Return a value with the groups that its labels are in by now, and FIXED for those that stay."""
        if isinstance(value, tuple):
            return tuple(self.renewed(each) for each in value)
        if not isinstance(value, LabelTensor) or value.labels is None:
            return value
        groups = self.groups.of(before := compact(value.labels))
        reason = self.groups.reason_of(groups)
        if varying(value.labels) and torch.equal(groups, before) and not bool(reason.any()):
            return value
        labels = tidy(torch.where(reason > 0, FIXED, groups).expand(value.shape))
        why = value.why if labels is not None else self.groups.reasons[int(reason.max())]
        if labels is not None and not varying(labels):
            self.stay(labels, why := why or "all of it is one group")
            labels = None
        return LabelTensor(value.shape, labels, why, value.constant)

    def join(self, one: Tensor, other: Tensor, why: str) -> None:
        """Join labels that meet; let those stay that meet a fixed element."""
        met = meeting_pairs(one, other)
        fixed = (met < 0).any(1)
        self.groups.join(met[~fixed])
        self.stay(met[fixed].amax(1), why)

    def hold(self, outer: Tensor, inner: Tensor) -> None:
        """Record in `inside` that each outer label holds the inner ones that it meets."""
        met = meeting_pairs(outer, inner)
        self.inside.append(met[(met >= 0).all(1)])
        self.stay(met[(met[:, 0] >= 0) & (met[:, 1] < 0), 0], "it holds elements that stay")

    def guard(self, labels: Tensor, outer: int, why: str) -> None:
        """Let at least one label stay at every index along the first `outer` axes."""
        sizes = labels.shape[:outer]
        above = self.fresh(sizes)
        self.stay(above, why)
        self.hold(above.reshape([*sizes, *[1] * (labels.dim() - outer)]), labels)

    def stay(self, labels: Tensor | None, why: str) -> None:
        if labels is not None:
            labels = torch.unique(compact(labels))
            self.groups.stay(labels[labels >= 0], why)

    def lump(self, labels: Tensor, dims: Sequence[int], why: str) -> Tensor:
        """Join labels along axes, and return them with size 1 there."""
        first = labels
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        met = meeting_pairs(first, labels)
        if len(met):
            self.join(first, labels, why)
            self.lumps.append((first.reshape(-1), why))
        return first

    def across(self, marks: LabelTensor, dims: Sequence[int], why: str) -> Tensor:
        """Join labels over all axes but these, and return them as [the sizes of dims, in their order]."""
        assert marks.labels is not None, why
        first = first_along(marks.labels, dims)
        self.join(place_along(first, dims, len(marks.shape)), marks.labels, why)
        return first

    def axis(self, constant: str, axes: tuple[int, ...], sizes: Sequence[int]) -> Tensor:
        """Return the labels [sizes] along axes of a weight, the same wherever the weight is used."""
        key = constant, axes
        if key not in self._axes:
            self._axes[key] = self.fresh(sizes)
        return self._axes[key]

    def use(self, node: fx.Node, name: str, axes: tuple[int, ...], labels: Tensor, role: Role) -> None:
        self.uses.setdefault(node, []).append(Use(node=node, name=name, axes=axes, labels=labels, role=role))

    @property
    def every_use(self) -> Iterator[Use]:
        """The uses in order of the program."""
        return (use for of_node in self.uses.values() for use in of_node)

    def constants_of(self, node: fx.Node) -> list[Use]:
        """Return a node's uses of parameters and constants."""
        return [use for use in self.uses.get(node, ()) if use.is_of_constant]

    def held_groups(self) -> list[tuple[Tensor, Tensor]]:
        """Return, for each relation of `inside`, the groups that hold and those held, each pair of two groups once."""
        relations = [meeting_pairs(*self.groups.of(met).unbind(1)) for met in self.inside]
        return [(met[:, 0], met[:, 1]) for met in relations if len(met)]

    def elements(self, marks: LabelTensor, node: fx.Node) -> Tensor:
        """Return a label or FIXED for every element; a constant's elements get new labels for this use of it."""
        if marks.labels is not None:
            return marks.labels
        if not marks.constant or math.prod(marks.shape) > MOST_ELEMENTS:
            return torch.full((), FIXED, dtype=torch.long).expand(marks.shape)
        labels = self.fresh(marks.shape)
        self.use(node, marks.constant, tuple(range(len(marks.shape))), labels, "between")
        return labels


def find_stuck(flow: Flow) -> Tensor:
    """Return the mask [labels] of those that stay: some by themselves, others for one they hold or are held by.

    A label stays if it holds one that stays, or if it is all that a staying one holds.
    """
    stays = flow.groups.reason_of(torch.arange(flow.groups.count)) > 0
    head_labels = flow.held_groups()
    while True:
        before = stays.clone()
        for outer, inner in head_labels:
            stays[outer[stays[inner]]] = True
            alone = torch.bincount(outer, minlength=len(stays)) == 1
            stays[inner[(alone & stays)[outer]]] = True
        if torch.equal(before, stays):
            return stays


def find_holders(flow: Flow) -> Tensor:
    """Return the mask [labels] of labels that name groups which hold other groups, as heads hold dimensions."""
    holds = torch.zeros(flow.groups.count, dtype=torch.bool)
    for outer, _ in flow.held_groups():
        holds[outer] = True
    return holds


def site_labels(flow: Flow, site: SiteGroups) -> Tensor:
    """Return the labels [G,M] of a site's groups in its first writer, for any program that has this parameter."""
    first = site.writers[0]
    labels = next(
        use.labels for use in flow.every_use if (use.name, use.axes, use.role) == (first.name, first.axes, "writes")
    )
    return flow.groups.of(labels.reshape(-1)[torch.from_numpy(first.index_GM)])
