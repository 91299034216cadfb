"""Cuts: tensors from which all later nodes are computed, and the program between two of them.

A model's blocks are found by cuts: after each block the rest of the program reads one stream alone.
"""

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils._pytree import tree_structure

from corp_deploy.traced.programs.program import (
    IN_FRONT,
    Program,
    batch_axis_of,
    find_reachable,
    module_of,
    number_at_one,
    operation,
)

from .flow import site_labels
from .labels import loses_elements
from .product import count_node_macs, is_contraction
from .sites import FoundSites

_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A node, the batch on its first axis, with a name that its copy in a narrowed program has too."""

    node: fx.Node
    name: str


def find_cuts(analysis: FoundSites, *, beside_outputs: bool = False, to_end: bool = False) -> tuple[Cut, ...]:
    """Find the cuts in order: between contractions, the first tensor that no sites but streams can narrow.

    In a program of several inputs, all inputs but the first and the side inputs are used before the first cut.
    `beside_outputs`: allow outputs in front of a cut if nothing is contracted for them alone; with several outputs, the
    last stream is a cut too. `to_end`: include a cut after the last contraction.
    """
    removable, names = torch.zeros(analysis.flow.groups.count, dtype=torch.bool), _names(analysis.program)
    for site in analysis.sites:
        if site.kind != "stream":
            removable[site_labels(analysis.flow, site)] = True
    out = find_output_branches(analysis.program) if beside_outputs else frozenset()
    chosen: list[Cut] = []
    is_due = False
    for node, since in find_bottlenecks(analysis.program, out, side_inputs(analysis.program)):
        is_due = is_due or any(map(is_contraction, since))
        value = node.meta.get("val")
        is_rows = isinstance(value, Tensor) and value.dim() > 1 and batch_axis_of(node) == IN_FRONT
        if is_due and is_rows and not loses_elements(analysis.flow.values[node], removable):
            chosen.append(Cut(node=node, name=names[node]))
            is_due = False
    is_at_end = bool(chosen) and not is_due and not out and not to_end
    return tuple(chosen[:-1] if is_at_end else chosen)


def find_bottlenecks(
    program: Program, out: frozenset[tuple[fx.Node, fx.Node]] = frozenset(), others: Sequence[fx.Node] = ()
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield nodes from which alone all later ones are computed, and the nodes since the last; ignore uses in `out`."""
    aside = input_free_nodes(program, others) | {user for _, user in out if user.op != "output"}
    nodes = [node for node in program.nodes if node not in aside]
    place = {node: at for at, node in enumerate(nodes)}
    last, start = 0, 0
    for at, node in enumerate(nodes):
        if last <= at and node.op == "call_function":
            yield node, nodes[start : at + 1]
            start = at + 1
        counted = (user for user in node.users if user in place and (node, user) not in out)
        last = max([last, *(place[user] for user in counted)])


def find_output_branches(program: Program) -> frozenset[tuple[fx.Node, fx.Node]]:
    """Return uses (node, user) for outputs but the one that most nodes compute; none if one needs a contraction."""
    before = {node: required_nodes(program, None, [node]) for node in program.output.all_input_nodes}
    longest = max(before, key=lambda node: len(before[node]))
    inside = {*before[longest], program.output}
    beside = {node for every in before.values() for node in every} - inside
    if any(count_node_macs(node) or node.op == "placeholder" for node in beside):
        return frozenset()
    early = [(node, program.output) for node in before if node is not longest]
    return frozenset(early + [(node, user) for user in beside for node in user.all_input_nodes])


def side_inputs(program: Program) -> tuple[fx.Node, ...]:
    """Return the inputs after the first, such as masks, if none is floating or contracted alone; else no input."""
    _, *others = program.inputs
    if not others or any(node.meta["val"].is_floating_point() for node in others):
        return ()
    return () if any(count_node_macs(node) for node in input_free_nodes(program, others)) else tuple(others)


def input_free_nodes(program: Program, others: Sequence[fx.Node] = ()) -> set[fx.Node]:
    """Return nodes that depend on no input but `others`: constants, sizes, and all that is computed from them."""
    free = set(others)
    for node in program.nodes:
        is_computed = node.op == "call_function" and free.issuperset(node.all_input_nodes)
        if node.op == "get_attr" or is_computed or number_at_one(node) is not None:
            free.add(node)
    return free


def _names(program: Program) -> dict[fx.Node, str]:
    count: Counter[tuple[str, str]] = Counter()
    names = {}
    for node in program.nodes:
        path, op = module_of(node)[0], operation(node)
        count[path, op] += 1
        names[node] = f"{path} {op} {count[path, op]}"
    return names


def extract_between(
    program: Program,
    before: fx.Node | None,
    after: fx.Node | None,
    *,
    beside: Sequence[fx.Node] = (),
    outputs: Sequence[fx.Node] | None = None,
) -> fx.GraphModule:
    """Build the graph from one cut, None for the inputs, to another, None for the outputs; it shares the parameters.

    After `before` it takes the side inputs and then the nodes `beside`. `outputs`: nodes to give as a tuple instead.
    """
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    entering = () if before is None else (before, *side_inputs(program), *beside)
    for each in entering:
        nodes[each] = graph.placeholder(each.name)
        nodes[each].meta = dict(each.meta)
    if before is not None:
        batch = graph.call_function(_SIZE, (nodes[before], 0))
    ends = [after or program.output] if outputs is None else outputs
    for node in required_nodes(program, before, ends, beside=beside):
        if operation(node) == "sym_size" and before is not None and node.args[0] not in nodes:
            nodes[node] = graph.call_function(operator.mul, (batch, number_at_one(node)))
        else:
            nodes[node] = graph.node_copy(node, lambda each: nodes[each])
    if outputs is not None:
        graph.output(tuple(nodes[node] for node in outputs))
    elif after is not None:
        graph.output((nodes[after],))
    if outputs is None:
        graph.set_codegen(_codegen(program, [node.name for node in entering], after))
    graph.eliminate_dead_code(lambda node: node.op != "call_module" and bool(node.is_impure()))  # a merge is pure
    return fx.GraphModule(program.graph, graph).eval()


def required_nodes(
    program: Program, before: fx.Node | None, ends: Collection[fx.Node], *, beside: Collection[fx.Node] = ()
) -> list[fx.Node]:
    """Return the nodes to compute these ends from a cut, side inputs and the nodes `beside`, or from the inputs.

    The ends are included, and sizes of tensors in front of the cut, though not those tensors.
    """
    found, inputs = _needed(program, before, ends, beside), set(program.inputs)
    assert before is None or not found & inputs, (before, ends)
    found |= inputs if before is None else set()
    return [node for node in program.nodes if node in found]


def outputs_after(program: Program, cut: fx.Node) -> list[fx.Node]:
    """Return the outputs that are computed from the tensor at a cut and side inputs alone."""
    nodes = program.output.all_input_nodes
    return [node for node in nodes if _needed(program, cut, [node]).isdisjoint(program.inputs)]


def _needed(
    program: Program, before: fx.Node | None, ends: Collection[fx.Node], beside: Collection[fx.Node] = ()
) -> set[fx.Node]:
    order = list(program.nodes)
    inside = set(order[0 if before is None else order.index(before) + 1 :])
    available = {*beside} if before is None else {before, *side_inputs(program), *beside}

    def entering(node: fx.Node) -> list[fx.Node]:
        is_size = operation(node) == "sym_size" and before is not None and node.args[0] not in inside | {before}
        return [] if is_size else [each for each in node.all_input_nodes if each not in available]

    return set(find_reachable((node for node in ends if node not in available), entering))


def _codegen(program: Program, entering: Sequence[str], after: fx.Node | None) -> _PyTreeCodeGen:
    """Return the code generator that nests the program's own inputs and outputs as the program does, others flat."""
    own = program.graph.graph._codegen
    assert isinstance(own, _PyTreeCodeGen), own
    names, arranged, leaving = own.pytree_info
    if entering:
        names, arranged = list(entering), tree_structure(((0,) * len(entering), {}))
    return _PyTreeCodeGen(_PyTreeInfo(names, arranged, tree_structure(0) if after is not None else leaving))
