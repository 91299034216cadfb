"""Programs rewritten for export: as a tree of modules, in one floating type, with attentions that engines fuse.

A trace in float32 records float32 for `.float()`, quotients of integers and types read off weights, and float32's least
number in masks. In half precision, products would then get two types, and the least number would be infinite.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn, ops
from torch.utils._pytree import tree_leaves

from .attention_masks import SDPA, attention_scale, find_attention_output
from .program import Program, module_of, named_arguments, operation, sizes_at_one, tensor_of

HIDDEN = -30_000.0
"""The number added to the scores of hidden keys: finite in half precision, and 0 after a softmax."""


def spell_out_causal_attentions_(graph: fx.GraphModule) -> None:
    """Rewrite causal attentions without another mask as products and a softmax, with a constant mask between.

    The exporter's own spelling computes the mask anew at every run. Attentions of equal sizes share one constant.
    """
    for node in list(graph.graph.nodes):
        arguments = named_arguments(node) if operation(node) == SDPA else {"is_causal": False}
        if arguments["is_causal"] and arguments["attn_mask"] is None and not arguments["enable_gqa"]:
            _spell_out_(graph, node)
    graph.recompile()


def _spell_out_(graph: fx.GraphModule, node: fx.Node) -> None:
    queries, keys, values = node.all_input_nodes
    shape = queries.meta["val"].shape[-2], keys.meta["val"].shape[-2]
    name = f"hidden_behind_{shape[0]}_{shape[1]}"
    if name not in dict(graph.named_buffers()):
        graph.register_buffer(name, torch.full(shape, HIDDEN).triu(1))
    aten, stack = torch.ops.aten, node.meta.get("nn_module_stack", {})

    def call_op(target: object, *args: object) -> fx.Node:
        new = graph.graph.create_node("call_function", target, args)  # type: ignore[arg-type]
        new.meta["nn_module_stack"] = stack
        return new

    with graph.graph.inserting_before(node):
        hidden_NN = graph.graph.get_attr(name)
        transposed_keys = call_op(aten.transpose.int, keys, -2, -1)
        scores = call_op(aten.matmul.default, call_op(aten.mul.Scalar, queries, attention_scale(node)), transposed_keys)
        weights = call_op(aten.softmax.int, call_op(aten.add.Tensor, scores, hidden_NN), -1, torch.float32)
        attended = call_op(aten.matmul.default, call_op(aten.to.other, weights, values), values)
    attended.meta |= node.meta
    node.replace_all_uses_with(attended)
    graph.graph.erase_node(node)


Pads = dict[int, list[int]]
"""The numbers of zeros to add on each side, as `pad` takes them, by the position of a node's argument."""


def pad_uneven_heads(program: Program) -> fx.GraphModule:
    """Build a graph whose attentions have one head width: queries and keys, or values, are padded with zeros.

    Engines fuse such attentions, and no result changes. A fused attention without an explicit scale stays as it is,
    since its scale follows from the width.
    """
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    pads = {node: each for owner in program.nodes for node, each in _pads(owner)}
    for node in program.nodes:
        new = nodes[node] = graph.node_copy(node, lambda each: nodes[each])
        for place, zeros in pads.get(node, {}).items():
            with graph.inserting_before(new):
                wider = graph.call_function(torch.ops.aten.pad.default, (new.args[place], zeros))
            wider.meta["val"] = torch.ops.aten.pad.default(wider.all_input_nodes[0].meta["val"], zeros)
            new.update_arg(place, wider)
        if node in pads and _values_place(node) in pads[node]:
            width = sizes_at_one(node)[-1]
            nodes[node] = graph.call_function(torch.ops.aten.slice.Tensor, (new, -1, 0, width))
            nodes[node].meta["val"] = node.meta["val"]
    graph.set_codegen(copy(program.graph.graph._codegen))
    return fx.GraphModule(program.graph, graph)


def has_heads_to_pad(program: Program) -> bool:
    """Check for an attention whose heads can be padded and have queries wider or narrower than values."""
    return any(pads for owner in program.nodes for pads in _pads(owner))


def _values_place(node: fx.Node) -> int:
    return 2 if operation(node) == SDPA else 1


def _pads(scores: fx.Node) -> Iterator[tuple[fx.Node, Pads]]:
    is_whole, node = operation(scores) == SDPA, find_attention_output(scores)
    if node is None or (is_whole and scores.kwargs.get("scale") is None):
        return
    queries, values = (sizes_at_one(each)[-1] for each in (scores.args[0], node.args[_values_place(node)]))  # type: ignore[arg-type]
    if queries < values:
        beside = [0, values - queries]
        yield scores, {0: beside, 1: beside if is_whole else [0, 0, *beside]}
    elif values < queries:
        yield node, {_values_place(node): [0, queries - values]}


_PRODUCTS = (
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "einsum", "gru", "linear", "lstm", "matmul",
    "mm", "rnn_relu", "rnn_tanh", "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT, _HALF = torch.finfo(torch.float32), torch.finfo(torch.float16)
_ENDS = {_FLOAT.min: _HALF.min, _FLOAT.max: _HALF.max}


def unify_types_(graph: fx.GraphModule) -> None:
    """Cast computed inputs of products to the type of their or the last weight; make float32's extremes float16's."""
    # A clamp to the end of float32's range does nothing, and has to go on doing nothing.
    others = [node for node in graph.graph.nodes if not operation(node).startswith("clamp")]
    _change_arguments_(others, lambda each: _ENDS.get(each, each) if isinstance(each, float) else each)
    weight: fx.Node | None = None
    for node in list(graph.graph.nodes):
        if operation(node) not in _PRODUCTS:
            continue
        weight = next((each for each in node.all_input_nodes if _is_floating(each, "get_attr")), weight)
        for entering in node.all_input_nodes if weight is not None else ():
            if _is_floating(entering, "call_function"):
                with graph.graph.inserting_before(node):
                    cast = graph.graph.call_function(ops.aten.to.other, (entering, weight))
                node.replace_input_with(entering, cast)
    graph.recompile()


def _is_floating(node: fx.Node, kind: str) -> bool:
    value = node.meta.get("val")
    return node.op == kind and isinstance(value, Tensor) and value.is_floating_point()


def set_device_(graph: fx.GraphModule, place: torch.device) -> None:
    """Set the device of all calls that create tensors in a program, such as those of the batch's size."""

    def names_device(node: fx.Node) -> bool:
        return any(isinstance(each, torch.device) for each in tree_leaves((node.args, node.kwargs)))

    if nodes := list(filter(names_device, graph.graph.nodes)):
        _change_arguments_(nodes, lambda each: place if isinstance(each, torch.device) else each)
        graph.recompile()


def _change_arguments_(nodes: Iterable[Any], change: Callable[[Any], Any]) -> None:
    for node in nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(each, change) for each in (node.args, node.kwargs))


Path = tuple[str, ...]


class CalledModule(nn.Module):
    """A module that build_module_tree makes: an exporter names nodes after it, unlike those of a GraphModule."""


class Norm(CalledModule):
    """A module that was traced from a norm other than batch norm and that called no other module."""


def build_module_tree(root: nn.Module, graph: fx.Graph) -> nn.Module:
    """Turn a flat graph into a tree of modules at the paths of the modules that it was traced from.

    The tensors of `root` keep their names. If a module was called again or its nodes are not consecutive, its later
    nodes become part of its parent's graph, except that those of norms get modules named `..._again_2` and so on.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    called = [node for node in nodes if node.op in ("call_function", "call_module")]
    return _ModuleBuilder(root=root, paths=_paths(called), path=()).build(called, inputs, nodes[-1])


@dataclass(slots=True, kw_only=True)
class _ModuleBuilder:
    """A builder of the module of one path: its graph, the new node for each old one, its modules and tensors."""

    root: nn.Module
    paths: Mapping[fx.Node, Path]
    path: Path
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    own: dict[str, Tensor | nn.Module] = field(default_factory=dict)

    def build(self, called: Sequence[fx.Node], entering: Sequence[fx.Node], end: fx.Node | None) -> nn.Module:
        """Build the module that runs the nodes `called` and takes the results of the nodes `entering`.

        `end`: the program's output node for the outermost module; other modules return all results used elsewhere.
        """
        for node in entering:
            self.nodes[node] = self.graph.placeholder(node.name)
        for name, path, run in self._runs(called):
            if name is None:
                for node in run:
                    self.nodes[node] = self.graph.node_copy(node, self._input_of)
                    if node.op == "call_module":
                        self.nodes[node].target = self._below(node)
                        self.own[self._below(node)] = self.root.get_submodule(str(node.target))
            else:
                self._call(name, path, run)
        if end is not None:
            self.graph.node_copy(end, self._input_of)
            self.graph.set_codegen(end.graph._codegen)
        else:
            leaving = tuple(self.nodes[node] for node in _leaving(called))
            self.graph.output(leaving[0] if len(leaving) == 1 else leaving)
        is_norm = all(self.paths[node] == self.path for node in called) and _is_norm(called)
        return _as_module(fx.GraphModule(self.own, self.graph), Norm if is_norm else CalledModule)

    def _runs(self, called: Sequence[fx.Node]) -> Iterator[tuple[str | None, Path, list[fx.Node]]]:
        """Yield name, path and nodes of each run of calls of one submodule; the name is None for this module's own."""
        depth, counts, again = len(self.path), Counter[str](), Counter[Path]()
        for name, together in groupby(called, lambda node: next(iter(self.paths[node][depth:]), None)):
            run = list(together)
            if name is not None:
                counts[name] += 1
            if name is None or counts[name] == 1:
                yield name, (*self.path, name or ""), run
                continue
            for norm, part in groupby(run, lambda node: self.paths[node] if _is_norm([node]) else None):
                if norm is not None:
                    again[norm] += 1
                own = None if norm is None else f"{'_'.join(norm[depth:])}__again_{again[norm] + 1}"
                yield own, norm or self.path, list(part)

    def _call(self, name: str, path: Path, run: list[fx.Node]) -> None:
        inside = set(run)
        every = dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in inside)
        # A module owns its tensors; all else is handed over to it.
        entering = [
            each for each in every if each.op != "get_attr" or tuple(str(each.target).split(".")[: len(path)]) != path
        ]
        self.own[name] = _ModuleBuilder(root=self.root, paths=self.paths, path=path).build(run, entering, None)
        arguments = tuple(self._input_of(each) for each in entering)
        # A graph's code calls its own module self, so no node may have that name.
        call = self.graph.create_node("call_module", name, arguments, {}, "self_" if name == "self" else name)
        leaving = _leaving(run)
        for at, node in enumerate(leaving):
            one = len(leaving) == 1
            self.nodes[node] = call if one else self.graph.call_function(operator.getitem, (call, at))

    def _input_of(self, node: fx.Node) -> fx.Node:
        if node not in self.nodes:
            assert node.op == "get_attr", node
            name = self._below(node)
            self.own[name] = tensor_of(self.root, str(node.target))
            self.nodes[node] = self.graph.get_attr(name)
        return self.nodes[node]

    def _below(self, node: fx.Node) -> str:
        return ".".join(str(node.target).split(".")[len(self.path) :])


def _as_module(graph: fx.GraphModule, base: type[CalledModule]) -> nn.Module:
    kind: type[CalledModule] = type(base.__name__, (base,), {"forward": type(graph).forward})
    module = kind.__new__(kind)
    module.__dict__ |= vars(graph.eval())
    return module


def _paths(called: Sequence[fx.Node]) -> dict[fx.Node, Path]:
    paths: dict[fx.Node, Path] = {}
    for node in reversed(called):
        path = module_of(node)[0]
        user = next((each for each in node.users if each in paths), None)
        own = tuple(path.split(".")) if path else ()
        paths[node] = own if user is None or "nn_module_stack" in node.meta else paths[user]
    return paths


def _leaving(run: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(run)
    return [node for node in run if any(user not in inside for user in node.users)]


def _is_norm(called: Sequence[fx.Node]) -> bool:
    kinds = {module_of(node)[1] for node in called}
    return bool(kinds) and all("Norm" in kind and "BatchNorm" not in kind for kind in kinds)
