"""Outputs of each block of an ONNX graph and of a torch module, to locate the block that breaks a failing link.

Names of nodes begin with their module's path, `blocks.3.attn.qkv/MatMul_1`. A site is that path up to one name after
the first number, `blocks.3.attn`, or its first name, `head`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from ground.errors import BadInput, Missing
from ground.feeds import Feeds, batch_size, select_rows, single_array
from ground.onnx_file import read_onnx
from ground.precision import FLOAT16, FLOAT32, FloatType

from .locate import FaultLocation, compare_blocks, locate_fault
from .rounding import NARROW, element_types, rounded_graph
from .structure import StructuralTest, judge_bound
from .tolerance import exact_tolerance

Array = NDArray[np.float32]
FLOATS = (TensorProto.FLOAT, *NARROW)


def site_of(node_name: str) -> str:
    """Return the site of a node's name, empty outside modules."""
    parts = node_name.rpartition("/")[0].split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 2] if numbers else parts[:1])


def site_outputs(model: ModelProto) -> dict[str, str]:
    """Return the values that leave their site (other sites or outputs read them), by key, in the graph's order.

    The last such value of a site has the site as its key. Earlier ones (residual sums) have `blocks.3:0` and so on, and
    so has the last one if a nested site follows it. Raises BadInput if no node's name has a path.
    """
    types, sites = element_types(model), {node.name: site_of(node.name) for node in model.graph.node}
    readers: dict[str, set[str]] = {value.name: {""} for value in model.graph.output}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(sites[node.name])
    leaving: dict[str, list[str]] = {}
    order: list[tuple[str, str]] = []
    for node in model.graph.node:
        site = sites[node.name]
        for name in node.output:
            if site and types.get(name) in FLOATS and readers.get(name, set()) - {site}:
                leaving.setdefault(site, []).append(name)
                order.append((site, name))
    if not order:
        raise BadInput("no node of this graph is named by its module (`blocks.3.attn/MatMul`); export it again")
    last = {sites[node.name]: place for place, node in enumerate(model.graph.node)}
    keys: dict[str, str] = {}
    for site, name in order:
        names = leaving[site]
        goes_on = any(other.startswith(f"{site}.") and later > last[site] for other, later in last.items())
        keys[f"{site}:{names.index(name)}" if goes_on or name != names[-1] else site] = name
    return keys


def outputs_of_graph(model: ModelProto, feeds: Feeds, *, batch: int = 8) -> dict[str, Array]:
    """Return each block's output by key, float32 [N, ...], rounded to the graph's types."""
    outputs_by_key = site_outputs(model)
    cut = rounded_graph(model)
    _add_outputs(cut, outputs_by_key.values())
    pieces = list(_run(cut, feeds, batch))
    return {key: np.concatenate([piece[name] for piece in pieces]) for key, name in outputs_by_key.items()}


def outputs_of_module(model: nn.Module, feeds: Feeds, *, batch: int = 8) -> dict[str, Array]:
    """Return the outputs [N, ...] of all modules that are sites and return a tensor, in order."""
    pieces: dict[str, list[Array]] = {}

    def keep(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            pieces.setdefault(name, []).append(output.detach().float().cpu().numpy())

    sites = {name: module for name, module in model.named_modules() if name and site_of(f"{name}/") == name}
    with ExitStack() as stack, torch.inference_mode():
        for name, module in sites.items():
            hook = module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
            stack.callback(hook.remove)
        for start in range(0, batch_size(feeds), batch):
            part = select_rows(feeds, slice(start, start + batch))
            model(*(torch.from_numpy(np.ascontiguousarray(array)) for array in part.values()))
    return {name: np.concatenate(rows) for name, rows in pieces.items()}


def largest_activations(model: ModelProto, feeds: Feeds, *, batch: int = 8) -> dict[str, float]:
    """Return the largest absolute element of each floating-point value of the graph."""
    types = element_types(model)
    names = {name for node in model.graph.node for name in node.output if types.get(name) in FLOATS}
    probed = rounded_graph(model)
    nodes = list(probed.graph.node)
    del probed.graph.node[:]
    for node in nodes:
        # Directly after its producer, so that a value is read and freed before the next one is computed.
        probed.graph.node.append(node)
        for name in names.intersection(node.output):
            probed.graph.node.append(helper.make_node("Abs", [name], [f"{name}/abs"], name=f"{name}/abs"))
            probed.graph.node.append(
                helper.make_node("ReduceMax", [f"{name}/abs"], [f"{name}/max"], name=f"{name}/max", keepdims=0)
            )
    _add_outputs(probed, [f"{name}/max" for name in sorted(names)])
    pieces = list(_run(probed, feeds, batch))
    return {name: max(float(piece[f"{name}/max"]) for piece in pieces) for name in names}


def largest_by_site(model: ModelProto, values: Mapping[str, float]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for node in model.graph.node:
        for name in node.output:
            if name in values and site_of(node.name):
                site = site_of(node.name)
                largest[site] = max(largest.get(site, 0.0), values[name])
    return largest


def find_fp16_values(model: ModelProto) -> set[str]:
    types = element_types(model)
    return {name for node in model.graph.node for name in node.output if types.get(name) == TensorProto.FLOAT16}


def _add_outputs(model: ModelProto, names: Any) -> None:
    there = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)


def _run(model: ModelProto, feeds: Feeds, batch: int) -> Iterator[dict[str, Any]]:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise Missing("onnxruntime is not installed; install the extra `cpu` or `gpu`") from error
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # nothing is timed here
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED  # the order of the nodes
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    nodes = session.get_inputs()
    fixed = min((node.shape[0] for node in nodes if node.shape and isinstance(node.shape[0], int)), default=None)
    feeds = {nodes[0].name: single_array(feeds)} if len(nodes) == len(feeds) == 1 else feeds
    for start in range(0, batch_size(feeds), fixed or batch):
        part = select_rows(feeds, slice(start, start + (fixed or batch)))
        count = batch_size(part)
        # The last input fills up a batch of fixed size.
        filled = part if fixed is None else select_rows(part, np.minimum(np.arange(fixed), count - 1))
        rows = session.run(None, {name: np.ascontiguousarray(array) for name, array in filled.items()})
        yield {name: row[:count] if row.ndim else row for name, row in zip(names, rows, strict=True)}


def measure_block_noise(dense_fp32: ModelProto, dense_half: ModelProto, feeds: Feeds) -> dict[str, float]:
    fp32, half = (outputs_of_graph(graph, feeds) for graph in (dense_fp32, dense_half))
    return {block.key: block.error for block in compare_blocks(fp32, half)}


def locate_in_half(
    link: str,
    fp32: ModelProto,
    half: ModelProto,
    feeds: Feeds,
    *,
    noise: Mapping[str, float],
    fix_command: str = "",
    float_type: FloatType = FLOAT16,
    scaled: Collection[str] = (),
) -> FaultLocation:
    """Locate where a 16-bit graph deviates from its FP32 twin; `feeds` are a few inputs with large errors.

    `fix_command` is the command that helps, with `{site}` in it. `scaled` has sites whose outputs differ on purpose.
    Raises BadInput if the graphs share no block.
    """
    sides = [outputs_of_graph(graph, feeds) for graph in (fp32, half)]
    activations = largest_by_site(fp32, largest_activations(fp32, feeds))
    every = compare_blocks(*sides, noise=noise, float_type=float_type)
    errors = [error for error in every if error.site not in scaled]
    return locate_fault(link, errors, activations=activations, fix_command=fix_command, float_type=float_type)


def locate_in_exact(link: str, model: nn.Module, graph: ModelProto, feeds: Feeds, *, products: int) -> FaultLocation:
    """Locate where a float32 graph deviates from its torch model. Raises BadInput if they share no block."""
    sides = outputs_of_module(model, feeds), outputs_of_graph(graph, feeds)
    bound = exact_tolerance(products=products, largest_logit=0.0).max_relative_error
    assert bound is not None
    return locate_fault(link, compare_blocks(*sides, noise=bound), activations={}, factor=1.0)


def check_headroom(candidate: str, fp32: Path, fp16: Path, feeds: Feeds) -> StructuralTest:
    """Test that the values that are float16 in one graph stay below 65,504 in the float32 graph.

    Masks with the largest float32 value don't count. Raises BadInput unless both graphs are exports of one model.
    """
    fp16_names = find_fp16_values(read_onnx(fp16))
    graph = read_onnx(fp32)
    activations = largest_activations(graph, feeds)
    if 2 * len(fp16_names & activations.keys()) < len(fp16_names):
        raise BadInput(
            f"{candidate}: its values are not named as those of the float32 graph; export both from one model"
        )
    largest = {name: value for name, value in activations.items() if name in fp16_names and value != FLOAT32.largest}
    sites = largest_by_site(graph, largest)
    site, value = max(sites.items(), key=lambda item: item[1], default=("no site", 0.0))
    reason = f"{site} reaches {value:,.6g} in float16, which ends at {FLOAT16.largest:,.0f}"
    return judge_bound(candidate, "headroom", value, FLOAT16.largest, reason)
