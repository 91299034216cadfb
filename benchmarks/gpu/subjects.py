"""A model bound to one batch for timing, its output held against a plain call's before any time is believed."""

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
# ||timed - plain|| / ||plain||: other kernels round otherwise, wrong answers are far above.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


def compile_blocks(module: nn.Module, compiler: str) -> nn.Module:
    """Has the module's blocks compiled one by one: all are alike, so that the code of one serves all of them."""
    for name in block_names(module):
        module.get_submodule(name).compile(backend=compiler, dynamic=False)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A module on its device and in its precision, and how it is called.

    `graph` and `compiled` (see compile_blocks) are captured as CUDA graphs on a GPU. Borders are float32 as everywhere:
    casting belongs to the call, and so does laying the images out with their channels last. `tolerance`: how far the
    timed answer may be from the plain one, by default what its precision allows.
    """

    module: nn.Module
    mode: Mode
    precision: Precision
    device: str
    channels_last: bool = False
    tolerance: float | None = None

    def bind(self, images: Images) -> Bound:
        """Put a batch in place. Raises Refused where the timed call's answer isn't the plain one's."""
        plain = self.plain(images)
        bound, answer = self._bound_on_gpu(images, plain.shape) if self.device == "cuda" else self._bound_on_cpu(images)
        bound.laps(1, perf_counter_ns)
        refuse_unequal(answer(), plain, self.tolerance or TOLERANCE[self.precision])
        return bound

    def plain(self, images: Images) -> Tensor:
        """One uncompiled call outside any graph."""
        compiled = self.mode == "compiled"
        with torch.inference_mode(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            return self._call(torch.from_numpy(images).to(self.device)).cpu()

    def memory(self, images: Images) -> dict[str, int] | None:
        """Bytes of the weights and, at their most, of what one call allocates; None on a CPU."""
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
        """The call that compiles, beyond dynamo's limit of shapes, which all models share."""
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
    """Raises Refused for a difference, or for anything that is no number."""
    difference = float((timed.double() - plain.double()).norm() / plain.double().norm())
    if not difference <= tolerance:
        raise Refused(f"the timed call differs from the plain one by {difference:.3g} of its norm, allowed {tolerance}")
