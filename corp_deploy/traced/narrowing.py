"""The program again, without the elements that go: what is left of every parameter, and every size anew."""

from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from .call import Call, call_of
from .compaction import Uneven, kept, taken
from .emission import bare, emitted
from .flow import Flow
from .labels import compact
from .marks import Marks
from .program import Program, module_of, operation
from .resizing import agrees, loses, resized


class Refused(Exception):
    """The node at which the program can't be narrowed."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{operation(node)} in {module_of(node)[0] or 'the model'}: {reason}")
        self.node = node


def without(program: Program, flow: Flow, gone: Tensor) -> fx.GraphModule:
    """The program without the labels for which `gone` [labels] is true. Raises Refused."""
    new = _Narrowing(program, flow, gone)
    for node in program.nodes:
        if node.op != "get_attr":
            new.nodes[node] = new.narrowed(node) if new.is_narrower(node) else new.copied(node)
    new.graph.eliminate_dead_code()
    new.graph.lint()
    new.graph.set_codegen(copy(program.graph.graph._codegen))
    module = fx.GraphModule(_owner(program, new.tensors), new.graph)
    return module.eval()


@dataclass(slots=True)
class _Narrowing:
    """`gone` [labels]: whether each goes. `tensors`: what is left of the parameters, by name; several of one name for
    a table of which different uses keep different parts.
    """

    program: Program
    flow: Flow
    gone: Tensor
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def is_narrower(self, node: fx.Node) -> bool:
        values = (self.flow.values.get(each) for each in (node, *node.all_input_nodes))
        touches = self.flow.touches_of(node)
        return node.op == "call_function" and (
            any(loses(value, self.gone) for value in values)
            or any(bool(self.gone[self.flow.groups.of(each.labels).long()].any()) for each in touches)
        )

    def copied(self, node: fx.Node) -> fx.Node:
        return bare(self.graph.node_copy(node, lambda each: self.whole(each)))

    def whole(self, node: fx.Node) -> fx.Node:
        """A node that enters another, a constant as it is."""
        return self.constant(node, None) if node.op == "get_attr" else self.nodes[node]

    def narrowed(self, node: fx.Node) -> fx.Node:
        value = self.flow.values[node]
        if operation(node) == "getitem":
            return self.picked(node)
        call = call_of(node, self.flow.values)
        try:
            target, arguments = resized(call, value, self.gone)
            if call.op == "unbind":
                return self.copied(node)
            if not agrees(call, target, arguments, value, self.gone):
                raise Refused(node, "what is left of it stands elsewhere")
            return emitted(self.graph, node, target, arguments, lambda each: self.entering(call, each))
        except (Uneven, RuntimeError) as error:
            raise Refused(node, f"an uneven part of it would be left, {error}") from error

    def entering(self, call: Call, node: fx.Node) -> fx.Node:
        return self.constant(node, self.mask(call, node)) if node.op == "get_attr" else self.nodes[node]

    def picked(self, node: fx.Node) -> fx.Node:
        """One of several; along an axis that is narrower now, by its new number."""
        source, number = node.args
        assert isinstance(source, fx.Node), node
        if operation(source) != "unbind":
            return self.copied(node)
        call = call_of(source, self.flow.values)
        whole, dim = call["self"], call["dim"]
        lines = whole.labels.movedim(dim, 0).reshape(whole.shape[dim], -1)
        keep = kept(lines, self.gone).any(1)
        if bool(keep.all()):
            return self.copied(node)
        arguments = {"self": call.arguments["self"], "dim": dim, "index": int(keep[:number].sum())}
        return emitted(self.graph, node, torch.ops.aten.select.int, arguments, lambda each: self.nodes[each])

    def mask(self, call: Call, constant: fx.Node) -> Tensor | None:
        """Which elements of a constant are left where this call uses it; None where all are."""
        shape = tuple(self.program.tensor(str(constant.target)).shape)
        touches = [each for each in self.flow.touches_of(call.node) if each.constant == constant.target]
        keep = torch.ones((1,) * len(shape), dtype=torch.bool) if touches else self.met(call, shape)
        for touch in touches:
            order = sorted(range(len(touch.axes)), key=lambda place: touch.axes[place])
            sizes = [shape[dim] if dim in touch.axes else 1 for dim in range(len(shape))]
            labels = self.flow.groups.of(touch.labels).permute(order).reshape(sizes)
            keep = keep & kept(labels, self.gone)
        return None if bool(keep.all()) else keep

    def met(self, call: Call, shape: tuple[int, ...]) -> Tensor:
        """Of a table that is spread over what it meets: the elements that meet any that is left, if those are the same
        everywhere; else it is spread out first.
        """
        value = self.flow.values[call.node]
        if not isinstance(value, Marks) or value.labels is None:
            return torch.ones((1,) * len(shape), dtype=torch.bool)
        keep = kept(compact(value.labels), self.gone)
        missing = keep.dim() - len(shape)
        own = others = keep
        for dim in range(keep.dim()):
            has_axis = dim >= missing and shape[dim - missing] > 1
            own, others = (own, others.any(dim, True)) if has_axis else (own.any(dim, True), others)
        return own.reshape(own.shape[missing:]) if torch.equal(own & others, keep) else keep

    def constant(self, node: fx.Node, keep: Tensor | None) -> fx.Node:
        """What is left of a constant; the first of several has its name."""
        name = str(node.target)
        key = name, b"" if keep is None else f"{tuple(keep.shape)}".encode() + keep.numpy().tobytes()
        if key not in self.names:
            count = sum(each[0] == name for each in self.names)
            self.names[key] = f"{name}_{count}" if count else name
            tensor = self.program.tensor(name)
            self.tensors[self.names[key]] = tensor if keep is None else _left(tensor, keep)
        new = self.graph.create_node("get_attr", self.names[key])
        new.meta = dict(node.meta)
        return bare(new)


def _left(tensor: Tensor, keep: Tensor) -> Tensor:
    """What is left of a tensor, spread out over axes that only the mask has."""
    shape = (1,) * (keep.dim() - tensor.dim()) + tuple(tensor.shape)
    sizes = [max(have, wants) for have, wants in zip(shape, keep.shape, strict=True)]
    return taken(tensor.reshape(shape).expand(sizes), keep)


def _owner(program: Program, tensors: dict[str, Tensor]) -> nn.Module:
    """A module that has tensors under their names, in the order of the dense one's."""
    order = {name: place for place, name in enumerate(program.graph.state_dict())}
    parameters = {name for name, _ in program.graph.named_parameters(remove_duplicate=False)}
    owner = nn.Module()
    for name in sorted(tensors, key=lambda each: order.get(each, len(order))):
        *path, last = name.split(".")
        at = owner
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        if name in parameters:
            at.register_parameter(last, nn.Parameter(tensors[name].detach(), requires_grad=False))
        else:
            at.register_buffer(last, tensors[name].detach())
    return owner
