"""Sites folded to a constant: the layer that reads such a site keeps only its bias, and the site is dead code."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from corp_deploy.traced.finding.site_groups import SiteGroups
from corp_deploy.traced.programs.program import Program, find_reachable, remove_unused_, set_tensor_
from corp_deploy.traced.programs.readers import LINEAR
from corp_deploy.traced.programs.sizes import infer_sizes_


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRemoval:
    """The names of two nodes: the only layer that reads a site, and one that writes it for as many tokens or rows."""

    reader: str
    writer: str


def find_whole_removal(program: Program, site: SiteGroups) -> WholeRemoval | None:
    """Return the layers around a site, or None if the site can't be removed as a whole.

    Its only reader has to be a linear layer with a bias that reads nothing else, and a linear layer has to write it.
    """
    nodes = {node.name: node for node in program.nodes}
    readers = {nodes[span.reader] for span in site.listening}
    if len(readers) != 1 or (reader := readers.pop()).target is not LINEAR or len(reader.args) < 3:
        return None
    source, weight = reader.all_input_nodes[:2]
    columns = {span.index_GM.size for span in site.readers if span.name == weight.target}
    if columns != {program.tensor(str(weight.target)).shape[1]} or len(site.readers) > 1 or len(weight.users) > 1:
        return None
    writer = _writer(source, {span.name for span in site.writers})
    return None if writer is None else WholeRemoval(reader=reader.name, writer=writer.name)


def _writer(source: fx.Node, written: set[str]) -> fx.Node | None:
    nodes = find_reachable([source], lambda node: [each for each in node.all_input_nodes if each.op == "call_function"])
    writers = (node for node in nodes if node.target is LINEAR and str(node.all_input_nodes[1].target) in written)
    writer = next(writers, None)
    is_as_long = writer and writer.all_input_nodes[0].meta["sizes"][:-1] == source.meta["sizes"][:-1]
    return writer if is_as_long else None


def remove_sites(program: Program, places: Iterable[WholeRemoval], inputs: list[torch.Tensor]) -> Program:
    """Return a copy of the program in which the readers of these sites read no channel; `inputs` only give shapes."""
    graph = copy.deepcopy(program.graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    for place in places:
        reader, writer = nodes[place.reader], nodes[place.writer]
        with graph.graph.inserting_before(reader):
            nothing = graph.graph.call_function(torch.ops.aten.slice.Tensor, (writer.args[0], -1, 0, 0))
        # The slice replaces the writer, so that both layers keep their modules.
        nothing.meta = {key: each for key, each in writer.meta.items() if key not in ("val", "sizes")}
        reader.update_arg(0, nothing)
        name = str(reader.args[1].target)
        weight = graph.get_parameter(name)
        set_tensor_(graph, name, weight.new_zeros(len(weight), 0))
    remove_unused_(graph)
    infer_sizes_(graph, inputs, any_batch=program.any_batch)
    return replace(program, graph=graph)


def fill_empty_readers_(graph: fx.GraphModule) -> None:
    """Let layers that read nothing read one channel with a weight of zero, as runtimes fail on empty tensors."""
    parameters = dict(graph.named_parameters())
    for node in graph.graph.nodes:
        weight = parameters.get(str(node.args[1].target)) if node.target is LINEAR else None
        if weight is not None and weight.shape[1] == 0:
            node.args[0].update_arg(3, 1)
            set_tensor_(graph, str(node.args[1].target), weight.new_zeros(len(weight), 1))
    graph.recompile()
