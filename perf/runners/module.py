"""Runner of a torch module: eager, compiled or as a CUDA graph, on CPU or GPU, in fp32, fp16 or bf16."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn

from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, checked_feeds
from ground.gpu import require_cuda
from ground.ports import LOGITS, OutputPort, Port, image_port
from ground.threads import wait_policy
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .cuda import Staging, capture_graph, open_stream
from .protocol import HostBound, MemoryGauge, resident_gauge, torch_gauge

Mode = Literal["eager", "compiled", "cuda_graph"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COMPILED_SHAPES = 1024  # beyond this limit torch.compile refuses the whole model
Precision = Literal["fp32", "fp16", "bf16"]
ANY_IMAGES = image_port((-1, -1, -1))
Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class ModuleRunner:
    """A runner of a module that takes one tensor [B, ...] per input and returns one per output.

    The module itself stays unchanged: a copy is moved, cast or compiled. `threads` is torch's number of threads,
    restored on exit.
    """

    module: nn.Module
    device: Literal["cpu", "cuda"] = "cpu"
    mode: Mode = "eager"
    precision: Precision = "fp32"
    threads: int | None = None
    flush_l2: bool = False
    label: str = "module"
    inputs: tuple[Port, ...] = (ANY_IMAGES,)
    outputs: tuple[OutputPort, ...] = (LOGITS,)
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
        self._ready = self.module
        if not self._runs_as_it_is():
            own = copy.deepcopy(self.module).eval().requires_grad_(False).to(self.device, DTYPES[self.precision])
            self._ready = torch.compile(own, dynamic=False, fullgraph=True) if self.mode == "compiled" else own
        return self

    def _runs_as_it_is(self) -> bool:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        is_on_device = {tensor.device.type for tensor in tensors} <= {self.device}
        training = any(module.training for module in self.module.modules())
        return self.mode == "eager" and is_on_device and floats <= {DTYPES[self.precision]} and not training

    def __exit__(self, *_: object) -> None:
        self._ready = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def __call__(self, feeds: Feeds) -> Outputs:
        with torch.inference_mode():
            return self._outputs_by_name(self._first_forward(self._tensors(self._checked(feeds))))

    def bind(self, feeds: Feeds) -> Bound:
        if self.device == "cuda":
            return self._bind_cuda(self._checked(feeds))
        batch = self._tensors(self._checked(feeds))
        with torch.inference_mode():
            self._first_forward(batch)

        def call() -> Tensors:
            with torch.inference_mode():
                return self._forward(batch)

        return HostBound(call, outputs=self._outputs_by_name)

    def gauge(self) -> MemoryGauge | None:
        return resident_gauge() if self.device == "cpu" else torch_gauge()

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
            "omp_wait_policy": wait_policy(os.environ) if cpu else None,
            "tf32": None if cpu else torch.backends.cuda.matmul.allow_tf32,
            "clock": "host" if cpu else "cuda events",
            "model": self.label,
        }

    def _checked(self, feeds: Feeds) -> Feeds:
        return checked_feeds(feeds, self.inputs, where=self.label)

    def _tensors(self, feeds: Feeds) -> Tensors:
        return tuple(torch.from_numpy(array).to(self.device) for array in feeds.values())

    def _outputs_by_name(self, tensors: Tensors) -> Outputs:
        return {
            port.name: np.asarray(tensor.cpu().numpy(), dtype=np.float32)
            for port, tensor in zip(self.outputs, tensors, strict=True)
        }

    def _first_forward(self, batch: Tensors) -> Tensors:
        """Return the outputs of a first call at a shape, which may compile, under a higher limit of compilations."""
        if self.mode != "compiled":
            return self._forward(batch)
        from torch._dynamo import config

        with config.patch(recompile_limit=COMPILED_SHAPES, accumulated_recompile_limit=COMPILED_SHAPES):
            return self._forward(batch)

    def _forward(self, batch: Tensors) -> Tensors:
        """Call the module on float32 inputs and outputs, with casts to its precision and back."""
        dtype = DTYPES[self.precision]
        cast = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)
        return tuple(tensor.float() for tensor in tensors_of_ports(self._ready(*cast), self.outputs, where=self.label))

    def _bind_cuda(self, feeds: Feeds) -> Bound:
        names = [port.name for port in self.outputs]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            shapes = [tensor.shape for tensor in self._first_forward(self._tensors(feeds))]
        staging = Staging.hold(self._stream, feeds, dict(zip(names, shapes, strict=True)))
        batch = tuple(staging.device_in.values())

        def launch() -> None:
            with torch.inference_mode():
                for name, tensor in zip(names, self._forward(batch), strict=True):
                    staging.device_out[name].copy_(tensor)

        return staging.bound(
            capture_graph(self._stream, launch) if self.mode == "cuda_graph" else launch, flush_l2=self.flush_l2
        )


def tensors_of_ports(answer: object, ports: Sequence[OutputPort], *, where: str) -> Tensors:
    """Return a model's outputs as one tensor per port. Raises BadInput for other outputs."""
    tensors = (answer,) if isinstance(answer, torch.Tensor) else answer
    if not isinstance(tensors, tuple) or [isinstance(each, torch.Tensor) for each in tensors] != [True] * len(ports):
        received = f"{len(tensors)} values" if isinstance(tensors, tuple) else f"a {type(answer).__name__}"
        names = ", ".join(port.name for port in ports)
        raise BadInput(
            f"{where}: gives {received}, expected {len(ports)} tensors in a tuple, or one bare tensor: {names}"
        )
    return tensors
