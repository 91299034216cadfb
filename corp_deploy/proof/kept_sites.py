"""The blocks of a graph that keep more bits: those that fail in sixteen bits or lose most by quantisation."""

import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import onnx
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised
from export.graph.precision import modules_beyond
from export.graph.quantised import simulate_quantisation, weighted_layers
from export.graph.quantiser import Quantiser
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, feeds_of_ports
from ground.onnx_file import read_onnx
from ground.precision import FLOAT16, FloatType, mixed_with_float32, type_by_name
from perf.parity import tolerance
from perf.parity.block_outputs import locate_in_half, site_of
from perf.parity.locate import FaultLocation, keep_until_it_passes
from perf.parity.tolerance import Tolerance
from perf.runners.module import ModuleRunner

from .candidates import run_in_batches
from .engine_search import BATCH, Answers, RepairResult, Trials, find_repair, measure_each_output, run_graph
from .locate import half_precision_of, measure_dense_noise, select_worst_inputs

FACTOR = 4.0  # the bound, as a multiple of the dense model's own error in the type, as in `verify`


def find_sites_to_keep(
    checkpoint: Checkpoint,
    dense: Checkpoint,
    feeds: Feeds,
    *,
    opset: int | None,
    geometry: HeadGeometry | None = None,
    float_type: FloatType = FLOAT16,
    engines: Answers | None = None,
    breaks: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
) -> RepairResult:
    """Find the fewest blocks to keep in FP32 so that the graph, otherwise in this type, passes on these inputs.

    `keep_fp32` and layers whose weights the type can't hold stay in FP32 in any case; `geometry` is as in
    export_checkpoint. If `engines` run the graphs, fusion breaks are tried before FP32, in addition to `breaks`. Raises
    BadInput if no set of blocks makes the graph pass.
    """
    mixed, ports = mixed_with_float32(float_type), output_ports(checkpoint.model)
    exportable = traced_model.exportable(checkpoint.model, geometry=geometry)
    always = tuple(dict.fromkeys((*keep_fp32, *modules_beyond(exportable, float_type))))

    def write(path: Path, sites: Sequence[str], kept: Sequence[str]) -> None:
        kept = (*always, *kept)
        export_checkpoint(
            checkpoint,
            path,
            precision=mixed.name if kept else mixed.pure,
            opset=opset,
            keep_fp32=kept,
            geometry=geometry,
            breaks=(*breaks, *sites),
        )

    with tempfile.TemporaryDirectory() as scratch:
        fp32 = Path(scratch) / "fp32.onnx"
        export_checkpoint(checkpoint, fp32, precision="fp32", opset=opset, geometry=geometry)
        trials = Trials(
            write=write,
            answers=engines or (lambda path: run_graph(path, feeds, ports)),
            reference=run_graph(fp32, feeds, ports),
            ports=ports,
            bounds=_bounds(dense, float_type, Path(scratch), feeds, opset),
            graph=Path(scratch) / "half.onnx",
        )
        if engines is not None:
            found = find_repair(trials)
            return replace(found, kept=(*always, *found.kept))

        def attempt(kept: tuple[str, ...]) -> FaultLocation | None:
            name = trials.failing(kept=kept)
            if name is None:
                return None
            role = next(port.role for port in ports if port.name == name)
            worst = select_worst_inputs(feeds, trials.reference[name], trials.last[name], role)
            noise_by_block = measure_dense_noise(dense, worst, float_type)
            graphs = read_onnx(fp32), read_onnx(trials.graph)
            return locate_in_half("half", *graphs, worst, noise=noise_by_block, float_type=float_type)

        kept, left = keep_until_it_passes(attempt)
        if left is not None:
            raise BadInput(f"no set of blocks in FP32 repairs this graph; still {left.reason}; export fp32")
        return RepairResult(kept=(*always, *kept))


def _bounds(
    dense: Checkpoint, float_type: FloatType, scratch: Path, feeds: Feeds, opset: int | None
) -> dict[str, Tolerance]:
    fp32, half, ports = scratch / "dense.onnx", scratch / "dense16.onnx", output_ports(dense.model)
    export_checkpoint(dense, fp32, precision="fp32", opset=opset)
    precision, kept = half_precision_of(dense, float_type)
    export_checkpoint(dense, half, precision=precision, keep_fp32=kept, opset=opset)
    noise = measure_each_output(ports, run_graph(fp32, feeds, ports), run_graph(half, feeds, ports))
    return {name: tolerance.half_tolerance(each, float_type=float_type, factor=FACTOR) for name, each in noise.items()}


def find_sites_to_leave(
    checkpoint: Checkpoint,
    made_of: Quantiser,
    precision: str,
    chosen: Quantisation,
    feeds: Feeds,
    bounds: Mapping[str, Tolerance],
    *,
    engines: Answers | None = None,
    breaks: Sequence[str] = (),
) -> RepairResult:
    """Find the fewest sites to leave unquantised so that the graph passes `bounds` against its FP32 twin.

    Sites are left in the order of their errors when quantised alone; bisection finds how many. Layers that `chosen`
    keeps stay in any case. If `engines` run the graphs, fusion breaks are tried first, in addition to `breaks`. Raises
    BadInput if the graph fails even with one quantised site.
    """
    ports = output_ports(checkpoint.model)
    modules = {layer.module: site_of(layer.node) for layer in weighted_layers(made_of.fp32_graph)}

    def is_left(module: str, left: Sequence[str]) -> bool:
        if engines is None:
            return modules[module] in left
        return any(fnmatchcase(module, pattern) for site in left for pattern in (site, f"{site}.*"))

    def write(path: Path, sites: Sequence[str], left: Sequence[str]) -> None:
        keep = (*chosen.keep_rest, *(module for module in modules if is_left(module, left)))
        keeping = replace(chosen, keep_rest=keep)
        export_quantised(made_of, path, precision=precision, chosen=keeping, breaks=(*breaks, *sites))

    with tempfile.TemporaryDirectory() as scratch:
        single = Path(scratch) / "single.onnx"
        onnx.save(made_of.fp32_graph, str(single))
        trials = Trials(
            write=write,
            answers=engines or (lambda path: run_graph(path, feeds, ports)),
            reference=run_graph(single, feeds, ports),
            ports=ports,
            bounds=bounds,
            graph=Path(scratch) / "tried.onnx",
            are_flips=engines is None,
        )
        return (
            find_repair(trials)
            if engines is not None
            else _fewest_left(trials, modules.values(), precision, chosen.rest)
        )


def _fewest_left(trials: Trials, sites_of_layers: Iterable[str], precision: str, rest: str) -> RepairResult:
    if trials.failing() is None:
        return RepairResult()
    sites = tuple(dict.fromkeys(sites_of_layers))
    alone = {site: trials.error(kept=[each for each in sites if each != site]) for site in sites}
    order = sorted(alone, key=lambda site: (-alone[site], site))

    def passes(count: int) -> bool:
        return trials.failing(kept=order[:count]) is None

    most = len(order) - 1
    if most < 1 or not passes(most):
        least = order[-1]
        raise BadInput(
            f"{precision}: this graph fails with any set of blocks left in {rest}: with {least} alone quantised it "
            f"still errs by {alone[least]:.2g}; export {rest}"
        )
    return RepairResult(kept=tuple(order[: 1 + bisect_left(range(1, most), True, key=passes)]))


def measure_quantised_bounds(dense: Checkpoint, precision: str, feeds: Feeds) -> dict[str, Tolerance]:
    """Return the bound of each output as in `verify`: twice the dense model's error by plain rounding."""
    inputs, ports = input_ports(dense.model), output_ports(dense.model)

    def run(model: nn.Module) -> Outputs:
        with ModuleRunner(model, inputs=inputs, outputs=ports, label=precision) as runner:
            return run_in_batches(lambda part: runner(feeds_of_ports(part, inputs)), feeds, BATCH)

    exportable = traced_model.exportable(dense.model)
    noise = measure_each_output(ports, run(exportable), run(simulate_quantisation(exportable, precision, run)))
    float_type = type_by_name(precision)
    return {name: tolerance.half_tolerance(each, float_type=float_type, factor=2.0) for name, each in noise.items()}
