"""The program again, without the elements that go: what is left of every parameter, and every size anew."""

import operator
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .call import Call, call_of
from .compaction import Uneven, kept, taken
from .flow import Flow
from .labels import compact
from .marks import Marks
from .program import Program, module_of, operation
from .resizing import agrees, is_move, loses, narrowed, resized


class Refused(Exception):
    """The node at which the program can't be narrowed."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{operation(node)} in {module_of(node)[0] or 'the model'}: {reason}")
        self.node = node


@dataclass(slots=True)
class _Narrowing:
    """`gone` [labels]: whether each goes. `tensors`: what is left of the parameters, by name."""

    program: Program
    flow: Flow
    gone: Tensor
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    variants: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def run(self) -> fx.GraphModule:
        for node in self.program.nodes:
            if node.op != "get_attr":
                self.copy(node)
        module = fx.GraphModule(nn.Module(), fx.Graph())
        own = dict(self.program.graph.named_parameters(remove_duplicate=False))
        order = {name: place for place, name in enumerate(self.program.graph.state_dict(keep_vars=True))}
        for name in sorted(self.tensors, key=lambda each: order.get(each, len(order))):
            _put(module, name, self.tensors[name], is_parameter=name in own or name not in order)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.graph.set_codegen(copy(self.program.graph.graph._codegen))
        module.graph = self.graph
        module.recompile()
        return module.eval()

    def copy(self, node: fx.Node) -> None:
        """One node, with what is left of all that it takes."""
        value = self.flow.values.get(node)
        loses_any = any(loses(self.flow.values.get(each), self.gone) for each in (node, *node.all_input_nodes))
        touched = any(bool(self.gone[self.labels(touch.labels)].any()) for touch in self.touches(node))
        if node.op == "call_function" and (loses_any or touched):
            self.narrow(node, value)
            return
        for each in node.all_input_nodes:
            if each.op == "get_attr":
                self.nodes[each] = self.constant(each, None)
        self.nodes[node] = self.graph.node_copy(node, lambda each: self.nodes[each])
        _bare(self.nodes[node])

    def labels(self, labels: Tensor) -> Tensor:
        return self.flow.groups.of(labels).long()

    def touches(self, node: fx.Node) -> list[Any]:
        return self.flow.touches_of(node)

    def narrow(self, node: fx.Node, value: Any) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            self._pick(node)
            return
        call = call_of(node, self.flow.values)
        try:
            target, arguments = resized(call, value, self.gone)
            narrowed(value, self.gone)
            if is_move(call) and call.op != "unbind" and not agrees(call, target, arguments, value, self.gone):
                raise Refused(node, "what is left of it stands elsewhere")
            arguments = {name: self.said(call, each) for name, each in arguments.items()}
        except Uneven as error:
            raise Refused(node, f"an uneven part of it would be left, {error}") from error
        self.emit(node, target, arguments)

    def emit(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> None:
        schema = target._schema.arguments
        first = [each.name for each in schema if not each.kwarg_only]
        new = self.graph.call_function(
            target,
            tuple(arguments[name] for name in first if name in arguments),
            {each.name: arguments[each.name] for each in schema if each.kwarg_only and each.name in arguments},
        )
        self.nodes[node] = new
        new.meta = dict(node.meta)
        _bare(new)

    def _pick(self, node: fx.Node) -> None:
        """One of several; of an axis that is narrower now by its new number."""
        source, number = node.args[0], node.args[1]
        assert operation(node) == "getitem" and isinstance(source, fx.Node), node
        if operation(source) == "unbind":
            whole: Marks = self.flow.values[source.args[0]]  # type: ignore[index]
            assert isinstance(number, int) and whole.labels is not None
            dim = source.args[1] if len(source.args) > 1 else 0
            assert isinstance(dim, int)
            keep = kept(whole.labels.movedim(dim, 0).reshape(whole.shape[dim], -1), self.gone).any(1)
            if not bool(keep.all()):
                at = self.nodes[source.args[0]]  # type: ignore[index]
                place = int(keep[:number].sum())
                self.nodes[node] = self.graph.call_function(torch.ops.aten.select.int, (at, dim, place))
                self.nodes[node].meta = dict(node.meta)
                _bare(self.nodes[node])
                return
        self.nodes[node] = self.graph.node_copy(node, lambda each: self.nodes[each])
        _bare(self.nodes[node])

    def said(self, call: Call, argument: Any) -> Any:
        """An argument in the new graph."""
        if isinstance(argument, tuple) and len(argument) == 3 and isinstance(argument[0], fx.Node):
            count, new, old = argument
            whole = self.graph.call_function(operator.mul, (self.nodes[count], new))
            return self.graph.call_function(operator.floordiv, (whole, old))
        if isinstance(argument, list | tuple):
            return [self.said(call, each) for each in argument]
        if not isinstance(argument, fx.Node):
            return argument
        if argument.op == "get_attr":
            return self.constant(argument, self.mask(call, argument))
        return self.nodes[argument]

    def mask(self, call: Call, constant: fx.Node) -> Tensor | None:
        """Which elements of a constant are left where this call uses it."""
        shape = tuple(self.program.tensor(str(constant.target)).shape)
        touches = [each for each in self.touches(call.node) if each.constant == constant.target]
        if not touches:
            return self._met(call, shape)
        keep = torch.ones((1,) * len(shape), dtype=torch.bool)
        for touch in touches:
            labels = self.flow.groups.of(touch.labels)
            order = sorted(range(len(touch.axes)), key=lambda place: touch.axes[place])
            sizes = [shape[dim] if dim in touch.axes else 1 for dim in range(len(shape))]
            keep = keep & kept(labels.permute(order).reshape(sizes), self.gone)
        return None if bool(keep.all()) else keep

    def _met(self, call: Call, shape: tuple[int, ...]) -> Tensor | None:
        """Of one that is spread over the elements that it meets: those that meet some that are left, or one copy for
        each where different ones are.
        """
        value = self.flow.values[call.node]
        if not isinstance(value, Marks) or value.labels is None:
            return None
        keep = kept(compact(value.labels), self.gone)
        missing = keep.dim() - len(shape)
        sizes = (1,) * missing + shape
        lacking = [dim for dim in range(keep.dim()) if sizes[dim] == 1 and keep.shape[dim] > 1]
        own = keep
        for dim in lacking:
            own = own.any(dim, keepdim=True)
        own = torch.ones_like(own) if all(size == 1 for size in own.shape) else own
        spread = own & torch.ones_like(keep)
        for dim in range(keep.dim()):
            if sizes[dim] > 1 or dim in lacking:
                continue
        whole = keep
        for dim in range(keep.dim()):
            if sizes[dim] > 1:
                whole = whole.any(dim, keepdim=True)
        if torch.equal(spread & whole, keep):
            own = own.reshape(own.shape[missing:])
            return None if bool(own.all()) else own
        return keep

    def constant(self, node: fx.Node, keep: Tensor | None) -> fx.Node:
        """What is left of a constant; the first of several has its name."""
        name = str(node.target)
        key = name, b"" if keep is None else bytes(str(tuple(keep.shape)), "ascii") + keep.numpy().tobytes()
        if key not in self.variants:
            count = sum(each[0] == name for each in self.variants)
            self.variants[key] = f"{name}_{count}" if count else name
            tensor = self.program.tensor(name)
            self.tensors[self.variants[key]] = tensor if keep is None else _spread(tensor, keep)
        new = self.graph.get_attr(self.variants[key])
        new.meta = dict(node.meta)
        return _bare(new)


def _spread(tensor: Tensor, keep: Tensor) -> Tensor:
    """What is left of a tensor, spread out over axes that only the mask has."""
    shape = (1,) * (keep.dim() - tensor.dim()) + tuple(tensor.shape)
    whole = [max(have, wants) for have, wants in zip(shape, keep.shape, strict=True)]
    return taken(tensor.reshape(shape).expand(whole), keep)


def _bare(node: fx.Node) -> fx.Node:
    """Without the tensors of the dense program."""
    node.meta = {key: each for key, each in node.meta.items() if key in ("nn_module_stack", "source_fn_stack")}
    return node


def _put(module: nn.Module, name: str, tensor: Tensor, *, is_parameter: bool) -> None:
    owner = module
    *path, last = name.split(".")
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    is_parameter = is_parameter and (tensor.is_floating_point() or tensor.is_complex())
    if is_parameter:
        owner.register_parameter(last, nn.Parameter(tensor.detach(), requires_grad=False))
    else:
        owner.register_buffer(last, tensor.detach())


def without(program: Program, flow: Flow, gone: Tensor) -> fx.GraphModule:
    """The program without the labels for which `gone` [labels] is true. Raises Refused."""
    return _Narrowing(program, flow, gone).run()


__all__ = ["Mapping", "Refused", "without"]
