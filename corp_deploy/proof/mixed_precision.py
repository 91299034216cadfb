"""Mixed precision that finds its own exceptions: only the blocks that break in sixteen bits stay in FP32."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corp_deploy.families.family import output_ports
from corp_deploy.families.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs
from ground.onnx_file import read_onnx
from ground.ports import OutputPort
from ground.precision import FLOAT16, FLOAT32, FloatType, mixed_with_float32
from perf.parity import tolerance
from perf.parity.block_outputs import locate_in_half
from perf.parity.locate import FaultLocation, keep_until_it_passes
from perf.parity.tolerance import Tolerance

from .candidates import Candidate, outputs_at
from .engine_search import Answers, RepairResult, first_failing, measured, mended, worst_error
from .locate import dense_noise, worst_inputs

BATCH = 16


def _run(path: Path, float_type: FloatType, feeds: Feeds, ports: Sequence[OutputPort]) -> Outputs:
    step = Candidate(label=path.name, name=path.name, form="graph", path=path, float_type=float_type)
    with step.opened(ports) as run:
        return outputs_at(run, feeds, BATCH)


def sites_to_keep(
    checkpoint: Checkpoint,
    dense: Checkpoint,
    feeds: Feeds,
    *,
    opset: int | None,
    geometry: HeadGeometry | None = None,
    factor: float = 4.0,
    float_type: FloatType = FLOAT16,
) -> RepairResult:
    """The fewest blocks that must stay in FP32 for the graph, else held in this type of sixteen bits, to pass its
    tolerance on these inputs.

    The tolerance is `factor` times the dense model's own error in that type, as `verify` judges it. `geometry` as for
    export_checkpoint. Raises BadInput when no set of blocks makes it pass.
    """
    with tempfile.TemporaryDirectory() as scratch:
        fp32, half = Path(scratch) / "fp32.onnx", Path(scratch) / "half.onnx"
        mixed = mixed_with_float32(float_type)
        export_checkpoint(checkpoint, fp32, precision="fp32", opset=opset, geometry=geometry)
        bounds = _bounds(dense, float_type, factor, Path(scratch), feeds, opset)
        ports = output_ports(checkpoint.model)
        reference = _run(fp32, FLOAT32, feeds, ports)
        errors = [0.0]

        def attempt(kept: tuple[str, ...]) -> FaultLocation | None:
            precision = mixed.name if kept else mixed.pure  # one with nothing to keep is no mixed one
            export_checkpoint(checkpoint, half, precision=precision, opset=opset, keep_fp32=kept, geometry=geometry)
            candidate = _run(half, float_type, feeds, ports)
            by_output = measured(ports, reference, candidate, bounds)
            errors.append(worst_error(by_output))
            name = first_failing(by_output, bounds)
            if name is None:
                return None
            role = next(port.role for port in ports if port.name == name)
            worst = worst_inputs(feeds, reference[name], candidate[name], role)
            graphs = read_onnx(fp32), read_onnx(half)
            noise_by_block = dense_noise(dense, worst, float_type)
            return locate_in_half("half", *graphs, worst, noise=noise_by_block, float_type=float_type)

        kept, left = keep_until_it_passes(attempt)
        if left is not None:
            raise BadInput(f"no set of blocks in FP32 mends this graph; still {left.reason}; export fp32")
    return RepairResult(kept=kept, relative_error=errors[-1])


def mended_mixed(
    checkpoint: Checkpoint,
    dense: Checkpoint,
    feeds: Feeds,
    answers: Answers,
    *,
    opset: int | None,
    geometry: HeadGeometry | None = None,
    factor: float = 4.0,
    float_type: FloatType = FLOAT16,
    breaks: Sequence[str] = (),
) -> RepairResult:
    """The same, judged by what engines of the graphs say (`answers`): fusion breaks are tried before FP32, beside those
    that are there in any case.
    """
    mixed, ports = mixed_with_float32(float_type), output_ports(checkpoint.model)

    def write(path: Path, sites: Sequence[str], kept: Sequence[str]) -> None:
        precision, every = mixed.name if kept else mixed.pure, (*breaks, *sites)
        export_options: dict[str, Any] = {"opset": opset, "geometry": geometry, "keep_fp32": kept, "breaks": every}
        export_checkpoint(checkpoint, path, precision=precision, **export_options)

    with tempfile.TemporaryDirectory() as scratch:
        fp32 = Path(scratch) / "fp32.onnx"
        export_checkpoint(checkpoint, fp32, precision="fp32", opset=opset, geometry=geometry)
        bounds = _bounds(dense, float_type, factor, Path(scratch), feeds, opset)
        reference = _run(fp32, FLOAT32, feeds, ports)
        return mended(write, answers, reference=reference, ports=ports, bounds=bounds, scratch=Path(scratch))


def _bounds(
    dense: Checkpoint, float_type: FloatType, factor: float, scratch: Path, feeds: Feeds, opset: int | None
) -> dict[str, Tolerance]:
    """By output `factor` times the dense model's own error in that type."""
    fp32, half = scratch / "dense.onnx", scratch / "dense16.onnx"
    export_checkpoint(dense, fp32, precision="fp32", opset=opset)
    export_checkpoint(dense, half, precision=mixed_with_float32(float_type).pure, opset=opset)
    ports = output_ports(dense.model)
    exact, rounded = _run(fp32, FLOAT32, feeds, ports), _run(half, float_type, feeds, ports)
    noise = measured(ports, exact, rounded)
    return {name: tolerance.half(each, float_type=float_type, factor=factor) for name, each in noise.items()}
