"""Runs a torch module: eager, compiled, or as a CUDA graph; on the CPU or a GPU; in fp32, fp16 or bf16."""

import copy
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn

from ground.errors import BadInput
from ground.gpu import require_cuda
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .cuda import Staging, captured, open_stream
from .memory import Gauge, TorchAllocator, resident_gauge
from .protocol import HostBound, Images, Logits, as_images

Mode = Literal["eager", "compiled", "cuda_graph"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COMPILED_SHAPES = 1024  # past the limit torch.compile would refuse the whole model
Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(slots=True)
class ModuleRunner:
    """A module that maps images to logits. What has to be moved, cast or compiled is a copy; the caller's own stays.

    Args:
        module: called with one tensor [B, 3, H, W], returns [B, classes].
        device: `cpu` or `cuda`; asking for cuda where there is none raises Missing.
        mode: `cuda_graph` needs cuda.
        threads: torch's threads, a setting of the whole process, put back on leaving; None leaves it.
        label: a name for the record.
    """

    module: nn.Module
    device: Literal["cpu", "cuda"] = "cpu"
    mode: Mode = "eager"
    precision: Precision = "fp32"
    threads: int | None = None
    flush_l2: bool = False
    label: str = "module"
    _ready: Any = field(default=None, init=False, repr=False)
    _stream: Any = field(default=None, init=False, repr=False)
    _threads_before: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads: at least 1, got {self.threads}")
        if self.device == "cpu" and (self.mode == "cuda_graph" or self.flush_l2):
            raise BadInput("a CUDA graph and an L2 flush need device cuda, got cpu")

    def __enter__(self) -> Self:
        if self.device == "cuda":
            require_cuda()
            self._stream = open_stream()
        if self.threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
        self._ready = self.module if self._runs_as_it_is() else self._copied()
        return self

    def _runs_as_it_is(self) -> bool:
        """Every call is made in inference mode, which changes nothing in an eval-mode module."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        there = {tensor.device.type for tensor in tensors} <= {self.device}
        training = any(module.training for module in self.module.modules())
        return self.mode == "eager" and there and floats <= {DTYPES[self.precision]} and not training

    def _copied(self) -> Any:
        module = copy.deepcopy(self.module).eval().requires_grad_(False).to(self.device, DTYPES[self.precision])
        return torch.compile(module, dynamic=False, fullgraph=True) if self.mode == "compiled" else module

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._ready = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def __call__(self, images: Images) -> Logits:
        with torch.inference_mode():
            logits = self._first(torch.from_numpy(as_images(images)).to(self.device))
        return np.asarray(logits.cpu().numpy(), dtype=np.float32)

    def bind(self, images: Images) -> Bound:
        if self.device == "cuda":
            return self._bind_cuda(as_images(images))
        batch = torch.from_numpy(as_images(images))
        with torch.inference_mode():
            self._first(batch)

        def call() -> torch.Tensor:
            with torch.inference_mode():
                return self._forward(batch)

        return HostBound(call)

    def gauge(self) -> Gauge | None:
        return resident_gauge() if self.device == "cpu" else TorchAllocator()

    def describe(self) -> Flat:
        assert self._ready is not None, "describe() before the runner was entered"
        cpu = self.device == "cpu"
        return {
            "backend": "torch",
            "version": torch.__version__,
            "device": self.device,
            "precision": self.precision,
            "mode": self.mode,
            "cuda_graph": self.mode == "cuda_graph",
            "flush_l2": self.flush_l2,
            "threads": torch.get_num_threads() if cpu else None,
            "tf32": None if cpu else torch.backends.cuda.matmul.allow_tf32,
            "clock": "host" if cpu else "cuda events",
            "model": self.label,
        }

    def _first(self, images: torch.Tensor) -> torch.Tensor:
        """The first call at a shape, which compiles for it; the shapes of all models count towards one limit."""
        if self.mode != "compiled":
            return self._forward(images)
        from torch._dynamo import config

        with config.patch(recompile_limit=COMPILED_SHAPES, accumulated_recompile_limit=COMPILED_SHAPES):
            return self._forward(images)

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        """Casting to the module's precision and back belongs to the call: borders are float32 everywhere."""
        logits: torch.Tensor = self._ready(images.to(DTYPES[self.precision]))
        return logits.float()

    def _bind_cuda(self, images: Images) -> Bound:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            shape = self._first(torch.from_numpy(images).to("cuda")).shape
        staging = Staging.hold(self._stream, images, shape)

        def launch() -> None:
            with torch.inference_mode():
                staging.device_out.copy_(self._forward(staging.device_in))

        return staging.bound(
            captured(self._stream, launch) if self.mode == "cuda_graph" else launch, flush_l2=self.flush_l2
        )
