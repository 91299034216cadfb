"""A walk through a program, op by op."""

from typing import Any

from torch import Tensor, fx

from corp_deploy.traced.programs.program import Program, operation, sizes_at_one

from .call import call_of
from .flow import Flow
from .labels import LabelTensor
from .moves import fixed, stopped
from .rules import rule_of


def walked(program: Program, *, keeps_all: bool = False) -> Flow:
    """All that labels of the program's weights meet, in order of the program; `keeps_all` as Flow's."""
    flow = Flow(program=program, keeps_all=keeps_all)
    for node in program.nodes:
        flow.times_used[str(node.target)] += len(node.users) if node.op == "get_attr" else 0
    for node in program.nodes:
        if node.op == "output":
            for source in node.all_input_nodes:
                value = flow.values[source]
                flow.stay(value.labels if isinstance(value, LabelTensor) else None, "it is what the model gives")
        else:
            flow.values[node] = value_of(flow, node)
    flow.values = {node: flow.renewed(value) for node, value in flow.values.items()}
    return flow


def value_of(flow: Flow, node: fx.Node) -> Any:
    """What a node gives: Marks, several of them, or a number."""
    if node.op == "get_attr":
        return LabelTensor(tuple(flow.program.tensor(str(node.target)).shape), None, "", str(node.target))
    if node.op == "placeholder":
        shape = sizes_at_one(node)
        return None if shape is None else fixed(shape, f"it comes from the model's input {node.name}")
    value = node.meta.get("val")
    if not isinstance(value, Tensor | list | tuple):
        return _number(flow, node)
    for each in node.all_input_nodes:
        flow.values[each] = flow.renewed(flow.values[each])
    call = call_of(node, flow.values)
    rule = rule_of(node)
    if rule is not None:
        return rule(flow, call)
    if any(each.labels is not None for each in call.tensors):
        flow.unknown[call.op] += 1
    return stopped(flow, call)


def _number(flow: Flow, node: fx.Node) -> Any:
    """Sizes and what is computed of them, at a batch of 1."""
    if operation(node) == "sym_size":
        first = node.args[0]
        assert isinstance(first, fx.Node)
        return flow.values[first].shape[node.args[1]]
    assert callable(node.target), node
    call = call_of(node, flow.values)
    try:
        return node.target(*call.valued(node.args), **call.valued(node.kwargs))
    except TypeError:
        return None
