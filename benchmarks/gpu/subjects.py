"""A model bound to one batch for timing, whose output is first compared with that of a plain call."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.gpu.models import block_names
from benchmarks.gpu.record import Refused
from perf.runners.cuda import Staging, capture_graph, open_stream
from perf.runners.module import COMPILED_SHAPES, DTYPES, Precision
from perf.runners.protocol import HostBound
from perf.timing.laps import Bound

Mode = Literal["graph", "compiled", "eager"]
Images = NDArray[np.float32]
# ||timed - plain|| / ||plain||: rounding differs between kernels, and wrong outputs have much larger errors.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


def compile_blocks(module: nn.Module, compiler: str) -> nn.Module:
    """Compile the module's blocks one by one; equal blocks share their code."""
    for name in block_names(module):
        module.get_submodule(name).compile(backend=compiler, dynamic=False)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A module on its device and in its precision, and how it is called.

    `graph` and `compiled` (see compile_blocks) are captured as CUDA graphs on a GPU. Inputs and outputs are float32, so
    that casts, and the layout with channels last, are part of the call. `tolerance` is the allowed error of the timed
    output, by default that of the precision.
    """

    module: nn.Module
    mode: Mode
    precision: Precision
    device: str
    channels_last: bool = False
    tolerance: float | None = None

    def bind(self, images: Images) -> Bound:
        """Bind a batch. Raises Refused if the timed call's output differs from the plain one's."""
        plain = self.plain(images)
        bound, answer = self._bound_on_gpu(images, plain.shape) if self.device == "cuda" else self._bound_on_cpu(images)
        bound.laps(1, perf_counter_ns)
        refuse_unequal(answer(), plain, self.tolerance or TOLERANCE[self.precision])
        return bound

    def plain(self, images: Images) -> Tensor:
        """Return the output of one uncompiled call outside any graph."""
        compiled = self.mode == "compiled"
        with torch.inference_mode(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            return self._call(torch.from_numpy(images).to(self.device)).cpu()

    def memory(self, images: Images) -> dict[str, int] | None:
        """Return the bytes of the weights and the peak bytes of one call; None on a CPU."""
        if self.device != "cuda":
            return None
        held = {each.data_ptr(): each.nbytes for each in (*self.module.parameters(), *self.module.buffers())}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.plain(images)
        return {"weights_bytes": sum(held.values()), "call_bytes": torch.cuda.max_memory_allocated() - before}

    def _call(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        logits: Tensor = self.module(images.to(DTYPES[self.precision], memory_format=layout))
        return logits.float()

    def _first(self, images: Tensor) -> None:
        """Make the call that compiles, with a higher limit on the shapes that all models share."""
        if self.mode == "compiled":
            from torch._dynamo import config

            limits = {"recompile_limit": COMPILED_SHAPES, "accumulated_recompile_limit": COMPILED_SHAPES}
            with torch.inference_mode(), config.patch(limits):
                self._call(images)

    def _bound_on_cpu(self, images: Images) -> tuple[Bound, Callable[[], Tensor]]:
        batch, kept = torch.from_numpy(images), list[Tensor]()
        self._first(batch)

        def call() -> None:
            with torch.inference_mode():
                kept[:] = [self._call(batch)]

        return HostBound(call), lambda: kept[0]

    def _bound_on_gpu(self, images: Images, shape: Iterable[int]) -> tuple[Bound, Callable[[], Tensor]]:
        stream = open_stream()
        with torch.cuda.stream(stream):
            self._first(torch.from_numpy(images).to(self.device))
        staging: Any = Staging.hold(stream, {"images": images}, {"logits": tuple(shape)})
        images_in, logits_out = staging.device_in["images"], staging.device_out["logits"]
        logits_out.fill_(torch.nan)
        torch.cuda.synchronize()

        def launch() -> None:
            with torch.inference_mode():
                logits_out.copy_(self._call(images_in))

        ready = launch if self.mode == "eager" else capture_graph(stream, launch)
        return staging.bound(ready, flush_l2=False), lambda: staging.host_out["logits"]


def refuse_unequal(timed: Tensor, plain: Tensor, tolerance: float) -> None:
    """Raise Refused if outputs differ or are not finite."""
    difference = float((timed.double() - plain.double()).norm() / plain.double().norm())
    if not difference <= tolerance:
        raise Refused(f"the timed call differs from the plain one by {difference:.3g} of its norm, allowed {tolerance}")
