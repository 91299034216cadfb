"""How two models are run side by side, as it is asked for. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from .table import BENCH

if TYPE_CHECKING:
    from perf.runners.module import Mode, Precision
    from perf.runners.onnx import Provider

Backend = Literal["onnxruntime", "openvino", "torch", "aotinductor"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How both are run; what is None was not asked for. An option that what runs them would ignore is refused.

    `backend` is for model directories: torch, aotinductor after compiling a package, or onnxruntime (the default) or
    openvino after an export to FP32, which is for graphs, too. See BENCH.
    """

    backend: Backend | None = None
    device: Device | None = None
    provider: "Provider | None" = None
    mode: "Mode | None" = None
    dtype: "Precision | None" = None
    threads: int | None = None
    streams: int | None = None
    flush_l2: bool | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "RunOptions":
        """Those of the options of `bench` that say how both are run."""
        return cls(**{name: value for name, value in options.items() if name in BENCH.options})

    @property
    def asked(self) -> dict[str, Any]:
        """What was asked for, by the names that `bench` has."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}

    @property
    def cuda_graph(self) -> bool:
        return self.mode == "cuda_graph"
