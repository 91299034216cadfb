"""A traced program in segments one behind the other, and the streams between them as rows [B,N,C].

Legend: B inputs, N places of a stream, C channels.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from corp_deploy.traced.finding.cost import macs
from corp_deploy.traced.finding.cuts import between, cuts, outputs_behind
from corp_deploy.traced.finding.sites import Found, common_path
from corp_deploy.traced.programs.program import Program, operation, sizes_at_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor stands behind the batch: its sizes, and which of its axes, counted with the batch, is channels."""

    sizes: tuple[int, ...]
    axis: int

    def rows(self, x: Tensor) -> Tensor:
        """[B,N,C] of the tensor."""
        return x.movedim(self.axis, -1).reshape(len(x), -1, self.sizes[self.axis - 1])

    def tensor(self, x_BNC: Tensor) -> Tensor:
        """The tensor of [B,N,C]."""
        places = self.sizes[: self.axis - 1] + self.sizes[self.axis :]
        return x_BNC.reshape(len(x_BNC), *places, x_BNC.shape[-1]).movedim(-1, self.axis)


def layout_of(node: fx.Node, image: tuple[int, ...]) -> Layout:
    """Of what a node gives. Of a map those two axes are places that are nearer to the proportions of an image
    [C,H,W]: [B,C,H,W] or [B,H,W,C]. Of any other tensor the last axis is channels.
    """
    sizes = sizes_at_one(node)[1:]
    if len(sizes) != 3 or len(image) != 3:
        return Layout(sizes=sizes, axis=len(sizes))
    wanted = math.log(image[1] / image[2])
    first, last = (abs(math.log(one / other) - wanted) for one, other in pairwise(sizes))
    return Layout(sizes=sizes, axis=1 if last <= first else 3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The program between two cuts, `module` [B,...] -> [B,...] with the model's own parameters, of which `held` are
    the names; `name`: the path of what it contracts, once in a program.
    """

    name: str
    before: fx.Node
    after: fx.Node
    module: fx.GraphModule
    held: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Outputs of a model that gives several, by their `numbers`, of the stream at one cut, `before`: a tuple."""

    name: str
    before: fx.Node
    numbers: tuple[int, ...]
    module: fx.GraphModule

    def __call__(self, x_BNC: Tensor, image: tuple[int, ...]) -> dict[int, Tensor]:
        return dict(zip(self.numbers, self.module(layout_of(self.before, image).tensor(x_BNC)), strict=True))


def given_at_cuts(found: Found) -> tuple[Given, ...]:
    """All outputs of a model that gives several, each of the last stream that has it, in order of the streams; none of
    a model of one, and where some output is of no stream at a cut.
    """
    program = found.program
    leaves = tree_leaves(program.output.args[0])
    if len(leaves) == 1 or not all(isinstance(leaf, fx.Node) for leaf in leaves):
        return ()
    every, left, given = cuts(found, beside_outputs=True), set(range(len(leaves))), list[Given]()
    for cut in reversed(every):
        behind = set(outputs_behind(program, cut.node))
        numbers = tuple(sorted(number for number in left if leaves[number] in behind))
        if numbers:
            module = between(program, cut.node, None, outputs=[leaves[number] for number in numbers])
            given.insert(0, Given(name=cut.name, before=cut.node, numbers=numbers, module=module))
            left.difference_update(numbers)
    return () if left or given[-1].before is not every[-1].node else tuple(given)


def segments(found: Found) -> tuple[Segment, ...]:
    """In order, from the input to the output or, where there are several, to the last stream that outputs are of; none
    where the model takes several tensors, or several outputs are of no such stream or have sites behind it.
    """
    program = found.program
    inputs, given = [node for node in program.nodes if node.op == "placeholder"], _given(program)
    if len(inputs) != 1:
        return ()
    if given is not None:
        return tuple(_segments(program, [inputs[0], *(cut.node for cut in cuts(found)), given]))
    last = given_at_cuts(found)[-1:]
    held = {str(node.target) for each in last for node in each.module.graph.nodes if node.op == "get_attr"}
    if not last or any(span.name in held for site in found.sites for span in (*site.writers, *site.readers)):
        return ()
    return tuple(_segments(program, [inputs[0], *(cut.node for cut in cuts(found, beside_outputs=True))]))


def _segments(program: Program, at: list[fx.Node]) -> Iterator[Segment]:
    count: Counter[str] = Counter()
    given = _given(program)
    for before, after in pairwise(at):
        module = between(program, None if before is at[0] else before, None if after is given else after)
        name = common_path([node for node in module.graph.nodes if macs(node)] or [after])
        count[name] += 1
        unique = name if count[name] == 1 else f"{name}#{count[name]}"
        held = frozenset(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
        yield Segment(name=unique, before=before, after=after, module=module, held=held)


def _given(program: Program) -> fx.Node | None:
    """What the program gives where that is one tensor."""
    output = program.output
    is_one = program.graph.graph._codegen.pytree_info.out_spec.is_leaf()  # type: ignore[attr-defined]
    return output.all_input_nodes[0] if is_one and sizes_at_one(output.all_input_nodes[0]) else None


class ByRows(nn.Module):
    """A segment of streams as rows [B,N,C]."""

    def __init__(self, segment: Segment, image: tuple[int, ...]) -> None:
        super().__init__()
        self.module = segment.module
        self.entering, self.leaving = (layout_of(node, image) for node in (segment.before, segment.after))

    def forward(self, x_BNC: Tensor) -> Tensor:
        return self.leaving.rows(self.module(self.entering.tensor(x_BNC)))


def outline_of(graph: fx.Graph, tensors: fx.GraphModule) -> str:
    """The same for two graphs that compute alike on tensors of the same sizes."""
    return "\n".join(_lines(graph, tensors))


def _lines(graph: fx.Graph, tensors: fx.GraphModule) -> Iterator[str]:
    place = {node: at for at, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        sizes: Any = sizes_at_one(node)
        if node.op == "get_attr":
            sizes = tuple(_attribute(tensors, str(node.target)).shape)
        said = fx.node.map_aggregate((node.args, node.kwargs), lambda each: place.get(each, each))
        yield f"{operation(node)} {said} {sizes}"


def _attribute(module: fx.GraphModule, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    value = getattr(module.get_submodule(owner), last)
    assert isinstance(value, Tensor), name
    return value
