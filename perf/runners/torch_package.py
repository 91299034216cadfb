"""Runner of a package (.pt2) that AOTInductor compiled from a torch program, on the device it was compiled for.

A package is native code. Only torch's package loader opens it, because other loaders may unpickle a .pt2.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from ground.errors import BadInput, is_out_of_memory
from ground.feeds import Feeds, Outputs, checked_feeds, random_feeds
from ground.gpu import require_cuda
from ground.ports import OutputPort, Port
from ground.threads import wait_policy
from perf.record.runs import Flat
from perf.timing.laps import Bound

from .module import ModuleRunner
from .onnx_session import role_of_rank
from .protocol import HostBound, MemoryGauge, resident_gauge, torch_gauge

# Compiled code reads this variable at its first call and then refuses inputs of other sizes than it was compiled for.
CHECKED = "AOTI_RUNTIME_CHECK_INPUTS"


class _Compiled(nn.Module):
    """A loaded package as a module without weights."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _as_tuple(self.compiled(*inputs))


@dataclass(slots=True)
class PackageRunner:
    """A runner of a compiled program that takes one tensor [B, ...] per input; the caller has trusted its code.

    Without `outputs` it is run once to find them. `batch` and `precision` are for the record. `threads` is torch's
    number of threads on the CPU, restored on exit.
    """

    path: Path
    inputs: tuple[Port, ...]
    outputs: tuple[OutputPort, ...] = ()
    batch: str = "unknown"
    precision: str = "unknown"
    threads: int | None = None
    label: str = ""
    device: str = "cpu"
    flush_l2: bool = False
    _compiled: Any = field(default=None, init=False, repr=False)
    _on_gpu: ModuleRunner | None = field(default=None, init=False, repr=False)
    _threads_before: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads: at least 1, got {self.threads}")

    def __enter__(self) -> Self:
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such package")
        if self.device == "cuda":
            require_cuda()
        os.environ[CHECKED] = "1"
        if self.threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
        try:
            self._compiled = torch._inductor.aoti_load_package(str(self.path))
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            self.__exit__()
            raise BadInput(
                f"{self.path}: torch {torch.__version__} cannot load this package: {_one_line(error)}"
            ) from error
        if not self.outputs:
            answer = self._run(self._tensors(random_feeds(self.inputs, 1, seed=0)))
            self.outputs = tuple(
                OutputPort(name=f"output_{index}", role=role_of_rank(tensor.ndim))
                for index, tensor in enumerate(_as_tuple(answer))
            )
        if self.device == "cuda":
            self._on_gpu = ModuleRunner(
                _Compiled(self._compiled),
                device="cuda",
                flush_l2=self.flush_l2,
                inputs=self.inputs,
                outputs=self.outputs,
            ).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._compiled = self._on_gpu = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def __call__(self, feeds: Feeds) -> Outputs:
        return self._outputs_by_name(self._run(self._tensors(feeds)))

    def bind(self, feeds: Feeds) -> Bound:
        batch = self._tensors(feeds)
        self._run(batch)
        if self._on_gpu is not None:
            return self._on_gpu.bind(feeds)
        compiled = self._compiled

        def call() -> Any:
            with torch.inference_mode():
                return compiled(*batch)

        return HostBound(call, outputs=self._outputs_by_name)

    def gauge(self) -> MemoryGauge | None:
        return resident_gauge() if self.device == "cpu" else torch_gauge()

    def describe(self) -> Flat:
        assert self._compiled is not None, "describe() before the runner was entered"
        on_cpu, metadata = self.device == "cpu", self._compiled.get_metadata()
        return {
            "backend": "aotinductor",
            "version": torch.__version__,
            "device": self.device,
            "precision": self.precision,
            "mode": "package",
            "compiled_batch": self.batch,
            "compiled_for": str(metadata.get("AOTI_CPU_ISA" if on_cpu else "AOTI_COMPUTE_CAPABILITY", "unknown")),
            "cuda_graph": False,
            "flush_l2": self.flush_l2,
            "threads": torch.get_num_threads() if on_cpu else None,
            "omp_wait_policy": wait_policy(os.environ) if on_cpu else None,
            "clock": "host" if on_cpu else "cuda events",
            "model": self.label or self.path.name,
        }

    def _tensors(self, feeds: Feeds) -> tuple[torch.Tensor, ...]:
        checked = checked_feeds(feeds, self.inputs, where=str(self.path))
        return tuple(torch.from_numpy(array).to(self.device) for array in checked.values())

    def _run(self, batch: tuple[torch.Tensor, ...]) -> Any:
        try:
            with torch.inference_mode():
                answer = self._compiled(*batch)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            fed = ", ".join(str(list(tensor.shape)) for tensor in batch)
            raise BadInput(
                f"{self.path}: it doesn't run on {fed}: (a) it was compiled for another batch or size, compile it with "
                f"a dynamic batch or measure that one, (b) its code is wrong; {_one_line(error)}"
            ) from error
        for tensor in _as_tuple(answer):
            if tensor.ndim == 0 or len(tensor) != len(batch[0]):
                raise BadInput(
                    f"{self.path}: answers {list(tensor.shape)} to a batch of {len(batch[0])}; compile it with a "
                    "dynamic batch, or measure the one that it was compiled for"
                )
        return answer

    def _outputs_by_name(self, answer: Any) -> Outputs:
        arrays = [np.asarray(tensor.float().cpu().numpy(), dtype=np.float32) for tensor in _as_tuple(answer)]
        return dict(zip([port.name for port in self.outputs], arrays, strict=True))


def _as_tuple(answer: Any) -> tuple[torch.Tensor, ...]:
    return (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
