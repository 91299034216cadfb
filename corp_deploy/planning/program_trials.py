"""What the outputs of a traced model change by when some of its tensors do: what no change reaches runs once for all.

A change of a block reaches what is behind it alone, so that a trial runs half of a model where they are everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from calib.inputs import Inputs, as_tuple, chunks, tensors_by_name
from corp_deploy.traced.programs.program import Program, changes_in_place

_PIECE = 8  # inputs whose activations in front of all changes are in memory at a time
Change = Mapping[str, Tensor]
"""New tensors by the names of those that they stand for."""


class _Kept(fx.Interpreter):
    """Runs a program and keeps what some nodes give."""

    def __init__(self, program: Program, keeps: set[fx.Node]) -> None:
        super().__init__(program.graph)
        self.keeps, self.kept = keeps, dict[fx.Node, Any]()

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n in self.keeps:
            self.kept[n] = out
        return out

    def behind(self, nodes: Sequence[fx.Node], change: Change) -> Any:
        """What the program gives with these tensors changed, by the nodes that this reaches."""
        self.env = dict(self.kept)
        out: Any = None
        for node in nodes:
            for each in node.all_input_nodes:
                if each.op == "get_attr" and each not in self.env:
                    self.env[each] = self.fetch_attr(str(each.target))
            out = change[str(node.target)] if node.op == "get_attr" else super().run_node(node)
            self.env[node] = out
            for dead in self.user_to_last_uses.get(node, ()):
                self.env.pop(dead, None)
        self.env = {}
        return out


def _reached(program: Program, change: Change) -> list[fx.Node]:
    """The nodes that depend on these tensors, in order, themselves among them; all that compute where one of them
    changes what it is given, as nothing kept would stay what it was.
    """
    every = any(map(changes_in_place, program.nodes))
    reached = set[fx.Node]()
    for node in program.nodes:
        if node.op == "get_attr":
            is_reached = node.target in change
        else:
            is_reached = node.op != "placeholder" and (every or not reached.isdisjoint(node.all_input_nodes))
        if is_reached:
            reached.add(node)
    return [node for node in program.nodes if node in reached]


def _in_front(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What these nodes read of others."""
    inside = set(nodes)
    return {each for node in nodes for each in node.all_input_nodes if each.op != "get_attr" and each not in inside}


def effects_of_new_tensors(
    program: Program, inputs: Inputs, changes: Sequence[Change], dense: Sequence[Tensor]
) -> list[float]:
    """Squared relative change of the outputs, the mean of several, by each of these alone; `dense` are the outputs
    without them.
    """
    if not changes:
        return []
    behind = [_reached(program, change) for change in changes]
    keeps = set[fx.Node]().union(*map(_in_front, behind))
    moved = torch.zeros(len(changes), len(dense), dtype=torch.float64)
    start = 0
    for piece in chunks(inputs, _PIECE):
        given = tuple(tensors_by_name(piece).values())
        dense_of_piece = [each[start : start + len(given[0])].double() for each in dense]
        run = _Kept(program, keeps)
        run.run(*given)
        for place, (nodes, change) in enumerate(zip(behind, changes, strict=True)):
            outputs = as_tuple(run.behind(nodes, change))
            for number, (output, exact) in enumerate(zip(outputs, dense_of_piece, strict=True)):
                moved[place, number] += float((output.double() - exact).square().sum())
        start += len(given[0])
    energies = torch.tensor([float(each.double().square().sum()) for each in dense], dtype=torch.float64)
    shares: list[float] = (moved / energies).mean(1).tolist()
    return shares
