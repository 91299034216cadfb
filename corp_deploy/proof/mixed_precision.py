"""Mixed precision that finds its own exceptions: only the blocks that break in FP16 stay in FP32."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from corp_deploy.families.head_attention import Geometry
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from ground.errors import BadInput
from perf.parity import tolerance
from perf.parity.diagnosis import locate_in_half
from perf.parity.locate import Located, keep_until_found_nowhere
from perf.parity.measures import Measures, measures
from perf.parity.parity import judge
from perf.runners.onnx import OnnxRunner

from .candidates import Candidate, logits_at
from .locate import dense_noise, worst_images

BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """The sites to keep in FP32, and the relative logit error of such a graph against its FP32 twin."""

    kept: tuple[str, ...]
    relative_error: float

    @property
    def precision(self) -> str:
        """What the graph is then: one with nothing to keep is no mixed one."""
        return "mixed" if self.kept else "fp16"


def _run(path: Path, half: bool, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    step = Candidate(label=path.name, name=path.name, form="graph", path=path, half=half)
    with step.opened() as run:
        return logits_at(run, pixels, BATCH)


def sites_to_keep(
    checkpoint: Checkpoint,
    dense: Checkpoint,
    pixels: NDArray[np.float32],
    *,
    opset: int | None,
    geometry: Geometry | None = None,
    factor: float = 4.0,
) -> Mixed:
    """The fewest blocks that must stay in FP32 for the graph to pass the FP16 tolerance on these images.

    The tolerance is `factor` times the dense model's own FP16 error, as `verify` judges it. `geometry` as for
    export_checkpoint. Raises BadInput when no set of blocks makes it pass.
    """
    with tempfile.TemporaryDirectory() as scratch:
        single, half = Path(scratch) / "fp32.onnx", Path(scratch) / "fp16.onnx"
        export_checkpoint(checkpoint, single, precision="fp32", opset=opset, geometry=geometry)
        with OnnxRunner(single) as runner:
            reference = logits_at(runner, pixels, BATCH)
        bounds = tolerance.half(_dense_half_error(dense, Path(scratch), pixels, opset), factor=factor)
        errors = [0.0]

        def attempt(kept: tuple[str, ...]) -> Located | None:
            precision = Mixed(kept=kept, relative_error=0.0).precision
            export_checkpoint(checkpoint, half, precision=precision, opset=opset, keep_fp32=kept, geometry=geometry)
            candidate = _run(half, True, pixels)
            found = measures(reference, candidate, margin_noise=bounds.margin_noise)
            errors.append(found.relative_error)
            if judge(found, bounds)[0] == "PASS":
                return None
            worst = worst_images(pixels, reference, candidate)
            graphs = onnx.load(str(single)), onnx.load(str(half))
            return locate_in_half("half", *graphs, worst, noise=dense_noise(dense, worst))

        kept, left = keep_until_found_nowhere(attempt)
        if left is not None:
            raise BadInput(f"no set of blocks in FP32 mends this graph; still {left.reason}; export fp32")
    return Mixed(kept=kept, relative_error=errors[-1])


def _dense_half_error(dense: Checkpoint, scratch: Path, pixels: NDArray[np.float32], opset: int | None) -> Measures:
    single, half = scratch / "dense.onnx", scratch / "dense16.onnx"
    export_checkpoint(dense, single, precision="fp32", opset=opset)
    export_checkpoint(dense, half, precision="fp16", opset=opset)
    return measures(_run(single, False, pixels), _run(half, True, pixels))
