"""A program as modules that call each other as those did that it was traced from, by the same names."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor, fx, nn

from .program import module_of, tensor_of

Path = tuple[str, ...]


class Called(nn.Module):
    """A module of the tree, as one that is written by hand: of nodes inside of a GraphModule an export doesn't say
    where they were called.
    """


class Norm(Called):
    """One whose class was a norm's, other than that of a batch, and that called no other."""


def tree(root: nn.Module, graph: fx.Graph) -> nn.Module:
    """What the graph makes of the tensors of `root`, which stay at their names; a module that is called again, or whose
    work isn't done at a stretch, has what comes later done where it is called, but for norms, which are further modules
    then.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    called = [node for node in nodes if node.op in ("call_function", "call_module")]
    return _Making(root=root, paths=_paths(called), path=()).build(called, inputs, nodes[-1])


@dataclass(slots=True, kw_only=True)
class _Making:
    """The module of one path: what stands in its graph for each node, and the modules and tensors that it has."""

    root: nn.Module
    paths: Mapping[fx.Node, Path]
    path: Path
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    own: dict[str, Tensor | nn.Module] = field(default_factory=dict)

    def build(self, called: Sequence[fx.Node], entering: Sequence[fx.Node], end: fx.Node | None) -> nn.Module:
        """`end`: the program's output, of the outermost; None where what is used elsewhere leaves."""
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
        return _by_hand(fx.GraphModule(self.own, self.graph), Norm if is_norm else Called)

    def _runs(self, called: Sequence[fx.Node]) -> Iterator[tuple[str | None, Path, list[fx.Node]]]:
        """What is done at a stretch, with the name of the module that does it here, and its path; None for this one."""
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
        # What a module has itself stands in it.
        entering = [
            each for each in every if each.op != "get_attr" or tuple(str(each.target).split(".")[: len(path)]) != path
        ]
        self.own[name] = _Making(root=self.root, paths=self.paths, path=path).build(run, entering, None)
        arguments = tuple(self._input_of(each) for each in entering)
        # What the code of a graph calls itself no part of it may be called too.
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
        """The name of what a node takes, in this module."""
        return ".".join(str(node.target).split(".")[len(self.path) :])


def _by_hand(graph: fx.GraphModule, base: type[Called]) -> nn.Module:
    kind: type[Called] = type(base.__name__, (base,), {"forward": type(graph).forward})
    module = kind.__new__(kind)
    module.__dict__ |= vars(graph.eval())
    return module


def _paths(called: Sequence[fx.Node]) -> dict[fx.Node, Path]:
    """Where each was called; what was put there later stands with what uses it."""
    paths: dict[fx.Node, Path] = {}
    for node in reversed(called):
        path = module_of(node)[0]
        user = next((each for each in node.users if each in paths), None)
        own = tuple(path.split(".")) if path else ()
        paths[node] = own if user is None or "nn_module_stack" in node.meta else paths[user]
    return paths


def _leaving(run: Sequence[fx.Node]) -> list[fx.Node]:
    """What others use."""
    inside = set(run)
    return [node for node in run if any(user not in inside for user in node.users)]


def _is_norm(called: Sequence[fx.Node]) -> bool:
    kinds = {module_of(node)[1] for node in called}
    return bool(kinds) and all("Norm" in kind and "BatchNorm" not in kind for kind in kinds)
